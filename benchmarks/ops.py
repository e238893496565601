"""Overhead of in-memory operations: the peer, tdstore, and a floor of nested dicts and plain torch calls.

Run `python benchmarks/ops.py` (about 1.5 minutes), `--quick` for a first look (15 s).
"""

from __future__ import annotations

import copy
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _harness import FLOOR, OURS, PEER, Bench, Target, modules, own

# Of the project's first issue; the other groups are shown without a verdict.
TARGETS = [
    Target("get/set", 5.0),
    Target("index", 1.8),
    Target("index write", 1.8),
    Target("stack/cat", 6.0),
    Target("construct", 3.0),
]

Tree = dict[str, Any]
SAME_DICT = "both packages list the dict inside"
SWAPPED = "ours writes a new folder and swaps it with the old one; the peer writes into the old files"


# --- the data, as plain nested dicts; every candidate is made from the same tensors ---


def tree3() -> Tree:
    return {"a": torch.rand(3, 4), "b": {"b1": torch.rand(3, 4), "b2": torch.rand(3, 4)}}


def tree100() -> Tree:
    return {str(i): torch.rand(3, 4) for i in range(100)}


def tree_deep(depth: int = 19) -> Tree:
    node: Tree = {"leaf": torch.rand(3, 4)}
    for _ in range(depth - 1):
        node = {"leaf": torch.rand(3, 4), "n": node}
    return node


def tree_rl(rows: int = 10_000) -> Tree:
    def step() -> Tree:
        return {
            "obs": torch.rand(rows, 17),
            "reward": torch.rand(rows, 1),
            "done": torch.zeros(rows, 1, dtype=torch.bool),
        }

    return {**step(), "next": step()}


def leaves(tree: Tree) -> list[torch.Tensor]:
    return [leaf for v in tree.values() for leaf in (leaves(v) if isinstance(v, dict) else [v])]


def tree_map(fn: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    return {k: tree_map(fn, v) if type(v) is dict else fn(v) for k, v in tree.items()}


def rebuild(tree: Tree, flat: list[torch.Tensor]) -> Tree:
    """`tree` with its leaves replaced, in order."""
    rest = iter(flat)
    return tree_map(lambda _: next(rest), tree)


def zip_map(fn: Callable[[list[torch.Tensor]], torch.Tensor], trees: list[Tree]) -> Tree:
    return {
        k: zip_map(fn, [t[k] for t in trees]) if type(v) is dict else fn([t[k] for t in trees])
        for k, v in trees[0].items()
    }


def pairs(tree: Tree, prefix: tuple[str, ...] = ()) -> list[tuple[Any, Any]]:
    out: list[tuple[Any, Any]] = []
    for k, v in tree.items():
        out.append(((*prefix, k), v))
        if type(v) is dict:
            out += pairs(v, (*prefix, k))
    return out


def zero(tree: Tree, index: Any) -> None:
    for v in tree.values():
        if isinstance(v, dict):
            zero(v, index)
        else:
            v[index] = 0


def write(tree: Tree, index: Any, value: Tree) -> None:
    for k, v in tree.items():
        if type(v) is dict:
            write(v, index, value[k])
        else:
            v[index] = value[k]


def copy_(tree: Tree, value: Tree) -> None:
    for k, v in value.items():
        if type(v) is dict:
            copy_(tree[k], v)
        else:
            tree[k].copy_(v)


class Ops:
    """Adds rows: `td` is a function of a TensorDict, `floor` of the nested dict."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.modules = modules()

    def row(
        self,
        group: str,
        name: str,
        tree: Tree,
        td: Callable[[Any], object],
        floor: Callable[[Tree], object] | None,
        batch: tuple[int, ...] = (3,),
        why: str = "",
    ) -> None:
        if not self.bench.wants(group, name):
            return
        runs: dict[str, Callable[[], object]] = {}
        for candidate, module in self.modules.items():
            data = module.TensorDict(copy.deepcopy(tree), batch_size=batch)  # type: ignore[attr-defined]
            runs[candidate] = partial(own(td), data)
        if floor is not None:
            runs[FLOOR] = partial(floor, copy.deepcopy(tree))
        self.bench.micro(group, name, runs, why=why)

    def each(
        self, group: str, name: str, make: Callable[[Any], Callable[[], object]], floor: Callable[[], object] | None
    ) -> None:
        """A row whose candidates are prepared by `make(TensorDict)`."""
        if not self.bench.wants(group, name):
            return
        runs: dict[str, Callable[[], object]] = {c: own(make)(m.TensorDict) for c, m in self.modules.items()}  # type: ignore[attr-defined]
        if floor is not None:
            runs[FLOOR] = floor
        self.bench.micro(group, name, runs)


def construct(ops: Ops) -> None:
    t3, t100, deep = tree3(), tree100(), tree_deep()
    ops.each("construct", "{}", lambda cls: lambda: cls({}, [3]), dict)
    for name, tree in (("nested 3", t3), ("100 leaves", t100), ("deep 19", deep)):
        ops.each(
            "construct",
            name,
            lambda cls, tree=tree: lambda: cls(tree, [3]),
            lambda tree=tree: tree_map(lambda v: v, tree),
        )


def get_set(ops: Ops) -> None:
    deep_key = ("n",) * 18 + ("leaf",)
    x = torch.rand(3, 4)

    def walk(tree: Tree) -> object:
        for key in deep_key:
            tree = tree[key]
        return tree

    ops.row("get/set", "td['a']", tree3(), lambda td: td["a"], lambda d: d["a"])
    ops.row("get/set", "td.get('a')", tree3(), lambda td: td.get("a"), lambda d: d.get("a"))
    ops.row("get/set", "td['b', 'b1']", tree3(), lambda td: td["b", "b1"], lambda d: d["b"]["b1"])
    ops.row("get/set", "td[19 keys]", tree_deep(), lambda td: td[deep_key], walk)
    ops.row("get/set", "set 'a'", tree3(), lambda td: td.set("a", x), lambda d: d.__setitem__("a", x))
    ops.row("get/set", "td['a'] =", tree3(), lambda td: td.__setitem__("a", x), lambda d: d.__setitem__("a", x))
    ops.row("get/set", "set nested", tree3(), lambda td: td.set(("b", "b1"), x), lambda d: d["b"].__setitem__("b1", x))
    ops.row("get/set", "set in place", tree3(), lambda td: td.set("a", x, inplace=True), lambda d: d["a"].copy_(x))


def index(ops: Ops) -> None:
    two = {"a": torch.rand(3, 4, 2), "b": {"b1": torch.rand(3, 4, 2), "b2": torch.rand(3, 4, 2)}}
    i256 = torch.randint(0, 10_000, (256,))
    mask = torch.zeros(10_000, dtype=torch.bool)
    mask[i256] = True
    rows = torch.tensor([0, 2])
    for name, idx in (("[1]", 1), ("[1:3]", slice(1, 3)), ("[None]", None)):
        ops.row("index", name, tree3(), lambda td, i=idx: td[i], lambda d, i=idx: tree_map(lambda v: v[i], d))
    ops.row("index", "[:, 1]", two, lambda td: td[:, 1], lambda d: tree_map(lambda v: v[:, 1], d), (3, 4))
    ops.row("index", "[..., 0]", two, lambda td: td[..., 0], lambda d: tree_map(lambda v: v[:, 0], d), (3, 4))
    ops.row("index", "[list]", tree3(), lambda td: td[[0, 2]], lambda d: tree_map(lambda v: v.index_select(0, rows), d))
    ops.row(
        "index", "[range]", tree3(), lambda td: td[range(2)], lambda d: tree_map(lambda v: v.index_select(0, rows), d)
    )
    n = (10_000,)
    ops.row(
        "index",
        "RL[256 rows]",
        tree_rl(),
        lambda td: td[i256],
        lambda d: tree_map(lambda v: v.index_select(0, i256), d),
        n,
    )

    def masked(d: Tree) -> Tree:
        found = mask.nonzero().squeeze(1)
        return tree_map(lambda v: v.index_select(0, found), d)

    ops.row("index", "RL[mask]", tree_rl(), lambda td: td[mask], masked, n)
    ops.row("index", "RL[100:356]", tree_rl(), lambda td: td[100:356], lambda d: tree_map(lambda v: v[100:356], d), n)
    ops.row("index", "deep19[1]", tree_deep(), lambda td: td[1], lambda d: tree_map(lambda v: v[1], d))
    ops.row("index", "100 leaves[1]", tree100(), lambda td: td[1], lambda d: tree_map(lambda v: v[1], d))
    for group, name, idx, tree, batch in (
        ("index write", "[1] =", 1, tree3(), (3,)),
        ("index write", "[1:3] =", slice(1, 3), tree3(), (3,)),
        ("index write", "RL[256 rows] =", i256, tree_rl(), n),
        ("write frames", "[256 rows] =", i256, {"pixels": torch.zeros(10_000, 84, 84, dtype=torch.uint8)}, n),
    ):
        value = tree_map(lambda v, i=idx: v[i], tree)
        made = {c: m.TensorDict(value, batch_size=torch.empty(batch)[idx].shape) for c, m in ops.modules.items()}  # type: ignore[attr-defined]
        by_class = {type(v): v for v in made.values()}
        ops.row(
            group,
            name,
            tree,
            lambda td, i=idx, b=by_class: td.__setitem__(i, b[type(td)]),
            lambda d, i=idx, v=value: write(d, i, v),
            batch,
        )
    some = torch.tensor([True, False, True])
    for name, at in (("[1] = 0", 1), ("[mask] = 0", some)):
        ops.row("index write", name, tree3(), lambda td, i=at: td.__setitem__(i, 0.0), lambda d, i=at: zero(d, i))
    row = torch.rand(4)
    ops.row("index write", "set_at_", tree3(), lambda td: td.set_at_("a", row, 1), lambda d: d["a"].__setitem__(1, row))
    whole = torch.rand(3, 4)
    ops.row("index write", "set_", tree3(), lambda td: td.set_("a", whole), lambda d: d["a"].copy_(whole))


def iteration(ops: Ops) -> None:
    h, deep = tree100(), tree_deep()
    ops.row("iterate", "keys 100", h, lambda td: list(td.keys()), lambda d: list(d.keys()))
    ops.row("iterate", "values 100", h, lambda td: list(td.values()), lambda d: list(d.values()), why=SAME_DICT)
    ops.row("iterate", "items 100", h, lambda td: list(td.items()), lambda d: list(d.items()), why=SAME_DICT)
    ops.row(
        "iterate",
        "keys(T, T) deep19",
        deep,
        lambda td: list(td.keys(True, True)),
        lambda d: [k for k, v in pairs(d) if type(v) is not dict],
    )
    ops.row("iterate", "values(T, T) deep19", deep, lambda td: list(td.values(True, True)), leaves)
    ops.row("iterate", "items(T) deep19", deep, lambda td: list(td.items(True)), pairs)


def combine(ops: Ops) -> None:
    for n in (10, 64):
        trees = [tree3() for _ in range(n)]

        def stack(cls: Any, trees: list[Tree] = trees) -> Callable[[], object]:
            tds = [cls(t, [3]) for t in trees]
            return lambda: torch.stack(tds)

        ops.each("stack/cat", f"stack {n} x 3", stack, lambda trees=trees: zip_map(torch.stack, trees))
    trees = [tree3() for _ in range(10)]

    def cat(cls: Any) -> Callable[[], object]:
        tds = [cls(t, [3]) for t in trees]
        return lambda: torch.cat(tds)

    ops.each("stack/cat", "cat 10 x 3", cat, lambda: zip_map(torch.cat, trees))


def maps(ops: Ops) -> None:
    t3, h, deep = tree3(), tree100(), tree_deep()
    for name, tree in (("3", t3), ("100", h)):
        ops.row("map", f"clone {name}", tree, lambda td: td.clone(), lambda d: tree_map(torch.Tensor.clone, d))
    ops.row("map", "clone(False) 100", h, lambda td: td.clone(False), lambda d: tree_map(lambda v: v, d))
    for name, tree in (("3", t3), ("deep19", deep)):
        ops.row(
            "map",
            f"apply(x + 1) {name}",
            tree,
            lambda td: td.apply(lambda x: x + 1),
            lambda d: tree_map(lambda x: x + 1, d),
        )
    ops.row(
        "map",
        "to(float64) 3",
        t3,
        lambda td: td.to(torch.float64),
        lambda d: tree_map(lambda v: v.to(torch.float64), d),
    )
    ops.row("map", "to('cpu') 3", t3, lambda td: td.to("cpu"), lambda d: tree_map(lambda v: v.to("cpu"), d))


def pointwise(ops: Ops) -> None:
    for name, tree in (("3", tree3()), ("100", tree100()), ("deep19", tree_deep())):
        ops.row(
            "pointwise",
            f"td + 1: {name}",
            tree,
            lambda td: td + 1,
            lambda d: rebuild(d, torch._foreach_add(leaves(d), 1)),
        )
        ops.row(
            "pointwise",
            f"td * td: {name}",
            tree,
            lambda td: td * td,
            lambda d: rebuild(d, torch._foreach_mul(leaves(d), leaves(d))),
        )


def shape(ops: Ops) -> None:
    two = {"a": torch.rand(3, 4, 2), "b": {"b1": torch.rand(3, 4, 2), "b2": torch.rand(3, 4, 2)}}
    b2 = (3, 4)
    ops.row("shape", "view(-1)", two, lambda td: td.view(-1), lambda d: tree_map(lambda v: v.view(12, 2), d), b2)
    ops.row(
        "shape", "reshape(-1)", two, lambda td: td.reshape(-1), lambda d: tree_map(lambda v: v.reshape(12, 2), d), b2
    )
    ops.row(
        "shape", "unsqueeze(0)", two, lambda td: td.unsqueeze(0), lambda d: tree_map(lambda v: v.unsqueeze(0), d), b2
    )
    ops.row(
        "shape",
        "permute(1, 0)",
        two,
        lambda td: td.permute(1, 0),
        lambda d: tree_map(lambda v: v.permute(1, 0, 2), d),
        b2,
    )

    def unbind(d: Tree) -> list[Tree]:
        return [rebuild(d, list(row)) for row in zip(*[v.unbind(0) for v in leaves(d)], strict=True)]

    def split(d: Tree) -> list[Tree]:
        return [rebuild(d, list(row)) for row in zip(*[v.split(250) for v in leaves(d)], strict=True)]

    ops.row("shape", "unbind(0) 3", tree3(), lambda td: td.unbind(0), unbind)
    ops.row("shape", "unbind(0) deep19", tree_deep(), lambda td: td.unbind(0), unbind)
    ops.row("shape", "split RL in 40", tree_rl(), lambda td: td.split(250), split, (10_000,))


def structure(ops: Ops) -> None:
    t3, deep = tree3(), tree_deep()
    new = tree3()

    def update(method: str) -> Callable[[Any], Callable[[], object]]:
        def make(cls: Any) -> Callable[[], object]:
            td, other = cls(copy.deepcopy(t3), [3]), cls(new, [3])
            return lambda: getattr(td, method)(other)

        return make

    plain = copy.deepcopy(t3)
    ops.each("structure", "update", update("update"), lambda: (plain.update(a=new["a"]), plain["b"].update(new["b"])))
    ops.each("structure", "update_", update("update_"), lambda: copy_(plain, new))
    ops.row("structure", "select deep19", deep, lambda td: td.select("leaf"), lambda d: {"leaf": d["leaf"]})
    ops.row(
        "structure",
        "exclude deep19",
        deep,
        lambda td: td.exclude("leaf"),
        lambda d: {k: v for k, v in d.items() if k != "leaf"},
    )
    ops.row("structure", "empty(True) deep19", deep, lambda td: td.empty(recurse=True), lambda d: skeleton(d))
    ops.row(
        "structure",
        "flatten_keys deep19",
        deep,
        lambda td: td.flatten_keys("."),
        lambda d: {".".join(k): v for k, v in pairs(d) if type(v) is not dict},
    )
    flat = {".".join(k): v for k, v in pairs(deep) if type(v) is not dict}
    ops.row("structure", "unflatten_keys deep19", flat, lambda td: td.unflatten_keys("."), unflatten)
    ops.row("lock", "lock_ + unlock_ 3", t3, lambda td: td.lock_().unlock_(), None)
    ops.row("lock", "lock_ + unlock_ deep19", deep, lambda td: td.lock_().unlock_(), None)


def skeleton(tree: Tree) -> Tree:
    return {k: skeleton(v) for k, v in tree.items() if type(v) is dict}


def unflatten(tree: Tree) -> Tree:
    out: Tree = {}
    for key, value in tree.items():
        *path, last = key.split(".")
        node = out
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return out


def serialise(ops: Ops) -> None:
    ops.row(
        "pickle",
        "pickle round trip 3",
        tree3(),
        lambda td: pickle.loads(pickle.dumps(td)),
        lambda d: pickle.loads(pickle.dumps(d)),
    )
    group = "memmap 30"
    if not any(ops.bench.wants(group, n) for n in ("save", "load", "[1]")):
        return
    tree = {str(i): torch.rand(3, 4) for i in range(30)}
    root = Path(tempfile.mkdtemp(prefix="tdstore-bench-"))
    try:
        saves: dict[str, Callable[[], object]] = {}
        loads: dict[str, Callable[[], object]] = {}
        rows: dict[str, Callable[[], object]] = {}
        for candidate, module in ops.modules.items():
            cls = module.TensorDict  # type: ignore[attr-defined]
            td, path = cls(tree, [3]), str(root / candidate)
            saves[candidate] = partial(td.memmap, path)
            loads[candidate] = partial(cls.load_memmap, path)

            def row(cls: Any = cls, path: str = path, opened: list[Any] = []) -> object:  # noqa: B006
                if not opened:
                    opened.append(cls.load_memmap(path))
                return opened[0][1]

            rows[candidate] = own(row)
        floor = root / "floor.pt"
        saves[FLOOR] = lambda: torch.save(tree, floor)
        loads[FLOOR] = lambda: torch.load(floor, mmap=True, weights_only=True)
        ops.bench.micro(group, "save", saves, why=SWAPPED)
        ops.bench.micro(group, "load", loads)
        ops.bench.micro(group, "[1]", rows)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def imports(ops: Ops) -> None:
    """A fresh interpreter that imports the package and ends; the floor imports torch alone."""
    bench = ops.bench
    if not bench.wants("import", "import"):
        return

    def fresh(module: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    names = {PEER: "tensordict", OURS: "tdstore"}
    bench.io("import", "import", {**{c: fresh(names[c]) for c in ops.modules}, FLOOR: fresh("torch")})


def main() -> int:
    bench = Bench("In-memory operations (CPU time per call)", TARGETS)
    ops = Ops(bench)
    for part in (construct, get_set, index, iteration, combine, maps, pointwise, shape, structure, serialise):
        part(ops)
    imports(ops)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
