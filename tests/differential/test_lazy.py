"""Lazy stacks: everything that users do with them, on both sides.

Where ours is a TensorDict and the peer's a lazy stack, or the other way round, values are compared:
`reshape`, `flatten` and `repeat` copy, so that ours makes the stack; `narrow` and `expand` share memory, so that
ours stays lazy. Where the peer fails and ours does not, see test_lazy_ours.py.
"""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch

from .cases import Case, Cases
from .oracle import OURS, differences, outcome
from .stacks import DENSE, STACKS, content, exact
from .structures import t

case = Cases()


PEER_FAILS: dict[str, str] = {
    r"text@. (sum.*|mean.*|std|var.*|prod.*|norm|quantile|logsumexp|cummax.*)": "recursion error",
    r"text@. (amin|amax.*|any.0.|all.0.)": "recursion error",
    r"text@. max.0.": "a value that is the same in all rows is lost",
    r"text@. (flip|roll|new_zeros|masked_select all|== 1)": "values that are no tensors come out as empty TensorDicts",
    r"named@. (!= td|< 3|>= 3|== 1|== td|create_nested|empty|flatten_keys.*|split_keys)": "names are lost",
    r".*@[12] (masked_fill_?|set_at_)": "takes the stack dimension for the first one",
    r".*@[12] a padded": "stacks along dimension 0 whatever the stack dimension",
    r"(uneven|ragged)@. (flatten_keys.*|split_keys|requires_grad|set nested)": "refused, or fails inside",
    r"uneven@. clear": "keys that some elements have stay",
    r"ragged@. (append|extend|insert.*)": "the batch size is not that of the elements",
    r".* wrong names": "the number of names is not checked",
    r"one@0 var.0.": "of one row: 0, where torch gives NaN",
}
"""Cases -> what the peer does. Ours are compared with the TensorDict that the stack makes, or in test_lazy_ours.py."""
alone: dict[str, tuple[str, Any]] = {}


def over(names: Any, programs: dict[str, Any], how: Any = exact) -> None:
    for stack in names:
        for name, program in programs.items():
            if any(re.fullmatch(pattern, f"{stack} {name}") for pattern in PEER_FAILS):
                if stack in DENSE:
                    alone[f"{stack} {name}"] = (stack, program)
                continue
            case(f"{stack} {name}", lambda M, s=stack, p=program: how(p(STACKS[s](M))))


# --- access ---
over(
    STACKS,
    {
        "itself": lambda td: td,
        "batch_size": lambda td: td.batch_size,
        "keys": lambda td: sorted(td.keys()),
        "nested keys": lambda td: sorted(map(str, td.keys(True))),
        "leaf keys": lambda td: sorted(map(str, td.keys(True, True))),
        "a in": lambda td: ["a" in td, "x" in td, ("n", "b") in td.keys(True)],
        "get missing": lambda td: [td.get("q"), td.get("q", 5), td.get(("n", "q"))],
        "subscript missing": lambda td: td["q"],
        "get x": lambda td: td.get("x"),
        "as_list": lambda td: td.get("a", as_list=True),
        "shape of a": lambda td: td.get_item_shape("a"),
        "stack_dim": lambda td: td.stack_dim,
        "names": lambda td: list(td.names),
        "device": lambda td: td.device,
        "len": len,
        "ndim": lambda td: td.ndim,
        "numel": lambda td: td.numel(),
        "first is the element": lambda td: td.unbind(td.stack_dim)[0] is td.tensordicts[0],
        "is_empty": lambda td: td.is_empty(),
        "is_contiguous": lambda td: td.is_contiguous(),
        "is_locked": lambda td: td.is_locked,
        "is_memmap": lambda td: (td.is_memmap(), td.is_shared()),
        "dtype": lambda td: td.dtype,
        "bytes": lambda td: td.bytes(),
        "depth": lambda td: td.depth,
        "iterate": lambda td: list(td),
    },
)
over(
    DENSE,
    {
        "a": lambda td: td["a"],
        "a padded": lambda td: td.get("a", as_padded_tensor=True),
        "get_at": lambda td: td.get_at("a", 0),
        "items": lambda td: sorted(td.items(), key=lambda p: p[0])[0],
        "entry_class": lambda td: td.entry_class("a").__name__,
        "to_dict": lambda td: td.select("a").to_dict(),
        "contiguous": lambda td: td.contiguous(),
        "to_tensordict": lambda td: td.to_tensordict(),
    },
)
WITH_N = [s for s in STACKS if s.split("@")[0] not in ("text", "inner")]
over(
    WITH_N,
    {
        "n": lambda td: td["n"],
        "n shape": lambda td: (td.get_item_shape("n"), td.get_item_shape(("n", "b"))),
        "n as_list": lambda td: td.get(("n", "b"), as_list=True),
        "flatten_keys": lambda td: td.flatten_keys(),
        "flatten_keys /": lambda td: td.flatten_keys("/").unflatten_keys("/"),
        "select nested": lambda td: td.select(("n", "b")),
        "exclude nested": lambda td: td.exclude(("n", "b")),
        "rename nested": lambda td: td.rename_key_(("n", "b"), "c"),
        "rename to nested": lambda td: td.rename_key_("a", ("n", "c")),
        "del nested": lambda td: td.del_(("n", "b")),
        "set nested": lambda td: (
            td.set(("n", "b"), [x + 1 for x in td.get(("n", "b"), as_list=True)])
            if td.stack_dim == 0
            else td.set(("n", "q"), torch.zeros(*td.batch_size))
        ),
    },
)
over(
    [s for s in WITH_N if s in DENSE],
    {
        "n.b": lambda td: td["n", "b"],
        "write n": lambda td: (td["n"].zero_(), td),
        "set in n": lambda td: (td["n"].set("new", torch.ones(*td.batch_size)), td),
        "set n": lambda td: td.set("n", td["n"].to_tensordict()),
        "set m": lambda td: td.set(("m", "k"), torch.ones(*td.batch_size)),
        "set_ n": lambda td: td.set_(("n", "b"), td["n", "b"] + 1),
        "pop n": lambda td: (td.pop(("n", "b")), td),
    },
)

# --- trees ---
over(
    STACKS,
    {
        "clone": lambda td: (td.clone(), td.clone().tensordicts[0] is td.tensordicts[0]),
        "clone(False)": lambda td: td.clone(False),
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda td: pickle.loads(pickle.dumps(td)),
        "select": lambda td: td.select("a"),
        "select missing": lambda td: td.select("q"),
        "select missing, not strict": lambda td: td.select("q", strict=False),
        "select in place": lambda td: (td.select("a", inplace=True) is td, td),
        "exclude": lambda td: td.exclude("a"),
        "exclude x": lambda td: td.exclude("x"),
        "exclude in place": lambda td: (td.exclude("a", inplace=True) is td, td),
        "split_keys": lambda td: td.split_keys(["a"]),
        "empty": lambda td: td.empty(),
        "clear": lambda td: td.clear(),
        "rename": lambda td: td.rename_key_("a", "z"),
        "rename missing": lambda td: td.rename_key_("q", "z"),
        "del": lambda td: td.del_("a"),
        "del missing": lambda td: td.del_("q"),
        "pop missing": lambda td: td.pop("q"),
        "pop default": lambda td: td.pop("q", 3),
        "create_nested": lambda td: td.create_nested("new"),
        "filter_empty_": lambda td: td.filter_empty_(),
        "apply": lambda td: td.apply(lambda x: x + 1),
        "apply twice": lambda td: td.apply(lambda x, y: x + y, td.clone()),
        "apply None": lambda td: td.apply(lambda x: None),
        "apply_": lambda td: (td.apply_(lambda x: x + 1) is td, td),
        "named_apply": lambda td: td.named_apply(lambda k, x: x if k == "a" else None),
        "detach": lambda td: td.detach(),
        "data": lambda td: td.data,
        "grad": lambda td: td.grad,
        "requires_grad": lambda td: td.requires_grad,
        "double": lambda td: td.double(),
        "to(float16)": lambda td: td.to(torch.float16),
        "to(cpu)": lambda td: td.to("cpu"),
        "replace": lambda td: td.replace({}) is td,
        "zeros_like": lambda td: torch.zeros_like(td),
        "ones_like": lambda td: torch.ones_like(td),
        "full_like": lambda td: torch.full_like(td, 3),
        "torch.clone": torch.clone,
        "append": lambda td: (td.append(td.tensordicts[0].clone()), td),
        "insert": lambda td: (td.insert(1, td.tensordicts[0].clone()), td),
        "insert far": lambda td: (td.insert(99, td.tensordicts[0].clone()), td),
        "insert back": lambda td: (td.insert(-1, td.tensordicts[0].clone()), td),
        "extend": lambda td: (td.extend([td.tensordicts[0].clone(), td.tensordicts[0].clone()]), td),
        "append a dict": lambda td: td.append({}),
        "append another batch": lambda td: td.append(td.tensordicts[0].empty().unsqueeze(0)),
        "append locked": lambda td: td.lock_().append(td.tensordicts[0].clone()),
        "lock": lambda td: td.lock_(),
        "lock elements": lambda td: [e.lock_() for e in td.tensordicts] and td.is_locked,
        "unlock": lambda td: td.lock_().unlock_(),
        "unlock an element": lambda td: td.lock_().tensordicts[0].unlock_(),
        "locked set": lambda td: td.lock_().set("new", torch.zeros(*[max(1, n) for n in td.batch_size])),
        "locked del": lambda td: td.lock_().del_("a"),
        "locked rename": lambda td: td.lock_().rename_key_("a", "b"),
        "locked clone": lambda td: td.lock_().clone(),
        "locked double": lambda td: td.lock_().double().is_locked,
        "locked pickle": lambda td: pickle.loads(pickle.dumps(td.lock_())).is_locked,
    },
)

# --- writing ---
over(
    DENSE,
    {
        "set": lambda td: (td.set("new", t(*td.batch_size, 2)) is td, td),
        "set a": lambda td: td.set("a", t(*td.batch_size)),
        "set wrong": lambda td: td.set("new", t(17)),
        "set in place": lambda td: td.set("a", td["a"] + 1, inplace=True),
        "setitem": lambda td: (td.__setitem__("new", t(*td.batch_size)), td),
        "set_": lambda td: (td.set_("a", td["a"] + 1) is td, td),
        "set_ missing": lambda td: td.set_("q", t(*td.batch_size)),
        "set_at_": lambda td: td.set_at_("a", td["a"][0] + 5, 0),
        "set text": lambda td: (td.set("s", "new"), td.get("s")),
        "set_non_tensor": lambda td: (td.set_non_tensor("o", {"x": 1}), td.get("o")),
        "update dict": lambda td: td.update({"a": td["a"] + 1, "new": t(*td.batch_size)}),
        "update dense": lambda td: td.update(td.apply(lambda x: x + 1).select("a").to_tensordict()),
        "update lazy": lambda td: td.update(td.apply(lambda x: x + 1)),
        "update_ lazy": lambda td: td.update_(td.apply(lambda x: x + 1)),
        "update_ missing": lambda td: td.update_({"q": t(*td.batch_size)}),
        "update nested": lambda td: td.update({"n": {"new": t(*td.batch_size)}}),
        "setdefault": lambda td: (td.setdefault("new", t(*td.batch_size)), td),
        "pop": lambda td: (td.pop("a"), td),
        "replace a": lambda td: td.replace({"a": td["a"] + 1}),
        "locked set_": lambda td: td.lock_().set_("a", td["a"] + 1),
        "zero_": lambda td: (td.zero_() is td, td),
        "fill_": lambda td: td.fill_("a", 4.0),
        "element is written": lambda td: (td.set_("a", td["a"] + 1), td.tensordicts[0]["a"]),
    },
)
over(
    STACKS,
    {
        "names =": lambda td: (setattr(td, "names", [f"d{i}" for i in range(td.ndim)]), td),
        "rename dims": lambda td: td.rename_(*[f"d{i}" for i in range(td.ndim)]),
        "wrong names": lambda td: setattr(td, "names", ["one", "one"][: td.ndim] + ["three"]),
        "update_ itself": lambda td: td.update_(td.clone().zero_()),
        "zero_ all": lambda td: td.zero_(),
    },
)

# --- maths ---
NUMBERS = [s for s in STACKS if not s.startswith("inner")]
over(
    NUMBERS,
    {
        "+ 1": lambda td: td + 1,
        "1 - td": lambda td: 1 - td,
        "* 2.5": lambda td: td * 2.5,
        "/ 2": lambda td: td / 2,
        "** 2": lambda td: td**2,
        "neg": lambda td: -td,
        "abs": lambda td: td.abs(),
        "+ td": lambda td: td + td,
        "* td": lambda td: td.mul(td.clone()),
        "exp": lambda td: td.float().exp(),
        "sqrt": lambda td: td.float().sqrt(),
        "clamp_max": lambda td: td.clamp_max(5),
        "maximum": lambda td: td.maximum(td.clone()),
        "lerp": lambda td: td.float().lerp(td.float() + 1, 0.5),
        "addcmul": lambda td: td.float().addcmul(td.float(), td.float(), value=2),
        "+= 1": lambda td: (td.add_(1) is td, td),
        "*= td": lambda td: td.mul_(td.clone()),
        "sub_": lambda td: td.sub_(1),
        "div_": lambda td: td.float().div_(2),
        "exp_": lambda td: td.float().exp_(),
        "element after +=": lambda td: (td.add_(1), td.tensordicts[0])[1],
        "== 1": lambda td: td == 1,
        "== td": lambda td: td == td.clone(),
        "!= td": lambda td: td != td.clone(),
        "< 3": lambda td: td < 3,
        ">= 3": lambda td: td >= 3,
        "isnan": lambda td: td.isnan(),
        "any": lambda td: td.any(),
        "all": lambda td: td.all(),
    },
)
over(
    [s for s in NUMBERS if s in DENSE],
    {
        "== dense": lambda td: td == td.to_tensordict(),
        "dense ==": lambda td: td.to_tensordict() == td,
        "sum": lambda td: td.sum(),
        "sum(0)": lambda td: td.sum(0),
        "sum(-1)": lambda td: td.sum(-1),
        "sum(0) keepdim": lambda td: td.sum(0, keepdim=True),
        "sum feature": lambda td: td.sum(dim="feature"),
        "sum all dims": lambda td: td.sum(tuple(range(td.ndim))),
        "mean": lambda td: td.float().mean(),
        "mean(0)": lambda td: td.float().mean(0),
        "std": lambda td: td.float().std(),
        "var(0)": lambda td: td.float().var(0),
        "prod(0)": lambda td: td.prod(0),
        "amax(0)": lambda td: td.amax(0),
        "amin": lambda td: td.amin(),
        "max(0)": lambda td: td.max(0),
        "cummax(0)": lambda td: td.cummax(0),
        "all(0)": lambda td: td.all(0),
        "any(0)": lambda td: td.any(0),
        "norm": lambda td: td.float().norm(),
        "quantile": lambda td: td.float().quantile(0.5),
        "logsumexp": lambda td: td.float().logsumexp(0),
        "sum of one tensor": lambda td: td.select("a").sum(reduce=True),
        "where": lambda td: td.where(t(*td.batch_size, dtype=torch.bool), td + 1),
        "torch.where": lambda td: torch.where(t(*td.batch_size, dtype=torch.bool), td, td + 1),
        "where number": lambda td: td.where(t(*td.batch_size, dtype=torch.bool), 0),
        "masked_fill": lambda td: td.masked_fill(t(td.batch_size[0], dtype=torch.bool), 7),
        "masked_fill_": lambda td: td.masked_fill_(t(td.batch_size[0], dtype=torch.bool), 7),
        "masked_select": lambda td: td.masked_select(t(td.batch_size[0], dtype=torch.bool)),
        "masked_select all": lambda td: td.masked_select(t(*td.batch_size, dtype=torch.bool)),
        "new_zeros": lambda td: td.new_zeros(5),
        "flip": lambda td: td.flip(0),
        "roll": lambda td: td.roll(1, 0),
    },
    content,
)


@case.parametrize
def test_lazy(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("name", alone)
def test_as_the_stack_that_it_makes(name: str) -> None:
    stack, program = alone[name]
    lazy = outcome(lambda: content(program(STACKS[stack](OURS))))
    dense = outcome(lambda: content(program(STACKS[stack](OURS).to_tensordict())))
    assert not list(differences(dense, lazy))
