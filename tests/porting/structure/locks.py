"""Locks, batch sizes and in-place writes: what is allowed when, and what is shared with copies."""

import torch
from tensordict import TensorDict, lazy_stack


def attempt(what, action, errors=(RuntimeError, KeyError, ValueError)):
    try:
        action()
    except errors as error:
        kinds = [kind.__name__ for kind in (KeyError, ValueError, RuntimeError) if isinstance(error, kind)]
        print(what, "refused", bool(kinds))
    else:
        print(what, "done")


def main():
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3, 2)}}, [3])
    alias = td["n"]
    td.lock_()
    print(td.is_locked, alias.is_locked)
    attempt("set", lambda: td.set("new", torch.zeros(3)))
    attempt("set nested", lambda: td.set(("n", "new"), torch.zeros(3)))
    attempt("delete", lambda: td.del_("a"))
    attempt("rename", lambda: td.rename_key_("a", "z"))
    attempt("unlock a child", lambda: alias.unlock_())
    attempt("write in place", lambda: td.set_("a", torch.ones(3)))
    attempt("update in place", lambda: td.update_({"a": torch.full((3,), 2.0)}))
    attempt("index", lambda: td.__setitem__(0, td[1]))
    attempt("fill", lambda: td["a"].fill_(5))
    print(td["a"].tolist(), td.is_locked)
    with td.unlock_() as open_td:
        open_td["new"] = torch.zeros(3)
        print(open_td is td, td.is_locked)
    print(td.is_locked, sorted(td.keys()))
    with td.unlock_():
        with td.lock_():
            attempt("inside", lambda: td.set("x", torch.zeros(3)))
        attempt("after", lambda: td.set("x", torch.zeros(3)))
    attempt("locked again", lambda: td.set("y", torch.zeros(3)))

    copy, shallow = td.clone(), td.clone(recurse=False)
    print(copy.is_locked, shallow.is_locked, shallow["a"] is td["a"], copy["a"] is td["a"])
    shallow["only here"] = torch.zeros(3)
    print("only here" in td, sorted(td.copy().keys()) == sorted(td.keys()))
    view = td[:2]
    print(view.is_locked, view["a"].data_ptr() == td["a"].data_ptr())
    outer = TensorDict({"inner": TensorDict({"x": torch.zeros(2)}, [2])}, [2]).lock_()
    stack = lazy_stack([outer, outer.clone()]).lock_()
    print(stack.is_locked, stack[1].is_locked, stack.unlock_().is_locked)

    td = TensorDict({"a": torch.zeros(3, 4), "n": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4])}, [3])
    print(td.batch_size, td["n"].batch_size, td.shape == td.batch_size, td.size(0), td.dim())
    td.batch_size = [3, 4]
    print(td.batch_size, td["n"].batch_size)
    attempt("wrong batch size", lambda: setattr(td, "batch_size", [4, 3]))
    td.batch_size = []
    print(td.batch_size, td["n"].batch_size)
    td.auto_batch_size_()
    print(td.batch_size, td["n"].batch_size, td.auto_batch_size_(1).batch_size)
    attempt("entry too short", lambda: td.set("short", torch.zeros(2)))
    attempt("no such entry", lambda: td.set_("missing", torch.zeros(3)))
    attempt("wrong shape in place", lambda: td.set_("a", torch.zeros(3, 9)))
    attempt("a number for all rows", lambda: td.set("scalar", 3.0))
    td["row"] = [1, 2, 3]
    print(td["row"].tolist())
    td.zero_()
    td.empty().set("x", torch.zeros(3, 4))
    print(td["row"].sum().item(), td.empty().batch_size, len(td.empty().keys()), td.clear_device_().device)
    print(td.new_zeros(2)["a"].shape, td.new_ones((2, 5))["row"].shape, torch.full_like(td, 2)["a"].unique().tolist())
