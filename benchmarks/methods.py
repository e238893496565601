"""Some 370 calls of public methods on eleven shapes of containers, beside the peer: where is ours slower?

Run `python benchmarks/methods.py` (a minute of CPU time): it prints the rows in which the peer is faster, and the
geometric mean of each shape. `--once` only makes each call once, `--against PATH` adds another checkout of tdstore.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import types
import warnings
from argparse import ArgumentParser
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from _harness import OURS, PEER, geomean, modules
from _method_calls import CALLS, ELEMENTS, FIELDS, OPEN, WIDE, compiled

BASE = "base"
Tree = dict[str, Any]
Run = Callable[[], object]


# --- the shapes: each is made of the same tensors for every candidate ---


def leaf(number: int, batch: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(*batch, *((), (4,), (1,), (2, 3))[number % 4])


def two_levels(batch: tuple[int, ...]) -> Tree:
    return {**{f"k{i}": leaf(i, batch) for i in range(4)}, "n": {f"k{i}": leaf(i, batch) for i in range(3)}}


def many(leaves: int, batch: tuple[int, ...]) -> Tree:
    return {f"k{i}": leaf(i, batch) for i in range(leaves)}


def levels(depth: int, batch: tuple[int, ...]) -> Tree:
    tree: Tree = {"k0": leaf(1, batch)}
    for _ in range(depth - 1):
        tree = {"k0": leaf(1, batch), "n": tree}
    return tree


def fresh_copy(tree: Tree) -> Tree:
    return {key: fresh_copy(value) if isinstance(value, dict) else value.clone() for key, value in tree.items()}


def classes(m: Any) -> tuple[type, type]:
    """A tensorclass of 12 fields, of which two are others."""
    part = m.tensorclass(type("Part", (), {"__annotations__": dict.fromkeys(("k0", "k1"), torch.Tensor)}))
    hints = {**dict.fromkeys((f"k{i}" for i in range(10)), torch.Tensor), "n": part, "p": part}
    return m.tensorclass(type("Whole", (), {"__annotations__": hints})), part


def one_object(m: Any, tree: Tree) -> Any:
    whole, part = m.benchmark_classes
    fields = {k: part(**v, batch_size=[8]) if isinstance(v, dict) else v for k, v in tree.items()}
    return whole(**fields, batch_size=[8])


def fields() -> Tree:
    parts = {name: {"k0": leaf(0, (8,)), "k1": leaf(1, (8,))} for name in ("n", "p")}
    return {**many(10, (8,)), **parts}


def lazy(m: Any, tree: Tree) -> Any:
    whole = m.TensorDict(tree, batch_size=[8, 3])
    return m.lazy_stack([td.clone() for td in whole.unbind(0)])


SHAPES: dict[str, tuple[Callable[[], Tree], Callable[[Any, Tree], Any]]] = {
    "1 element": (lambda: {"k0": torch.rand(1)}, lambda m, t: m.TensorDict(t, batch_size=[1])),
    "7 leaves": (lambda: two_levels((5, 4)), lambda m, t: m.TensorDict(t, batch_size=[5, 4])),
    "60 leaves": (lambda: many(60, (128,)), lambda m, t: m.TensorDict(t, batch_size=[128])),
    "40 levels": (lambda: levels(40, (3,)), lambda m, t: m.TensorDict(t, batch_size=[3])),
    "tensorclass": (fields, one_object),
    "lazy stack": (lambda: two_levels((8, 3)), lazy),
}
LOCKED = {
    f"{kind}, locked": (tree, lambda m, t, make=make: make(m, t).lock_())
    for kind, (tree, make) in SHAPES.items()
    if kind != "1 element"
}


class Given:
    """What calls take beside the container: `other` is one like it, `x` a new leaf, `m` the package."""

    def __init__(self, m: Any, td: Any, make: Callable[[], Any]) -> None:
        self.m, self.make = m, make
        self.batch, self.cls = td.batch_size, type(td)
        self.zero = torch.tensor(0)
        self.rows = torch.arange(len(td)).flip(0)[:3]
        self.array, self.numbers = self.rows.numpy(), self.rows.tolist()
        self.wide = self.rows if td.ndim == 1 else self.rows[:, None].expand(-1, *td.batch_size[1:])
        self.mask = torch.arange(len(td)) % 2 == 0
        self.full = torch.arange(td.batch_size.numel()).reshape(td.batch_size) % 2 == 0
        self.x = torch.rand(*self.batch, 2)
        self.like = torch.rand(td.get("k0").shape)
        self.names = [f"d{i}" for i in range(td.ndim)]

    other = cached_property(lambda self: self.make())
    alone = cached_property(lambda self: self.make().unlock_())
    ones = cached_property(lambda self: torch.ones_like(self.other))
    row = cached_property(lambda self: self.other[0])
    part = cached_property(lambda self: self.other[0:1])
    some = cached_property(lambda self: self.other[self.rows])
    masked = cached_property(lambda self: self.other[self.mask])
    column = cached_property(lambda self: self.other[:, 0])
    values = cached_property(lambda self: self.other.to_dict())
    row_values = cached_property(lambda self: self.row.to_dict())
    some_values = cached_property(lambda self: self.some.to_dict())
    entries = cached_property(lambda self: dict(self.other.items()))
    state = cached_property(lambda self: self.other.state_dict())


class Bench:
    """Times every call on every shape, with the candidates in turns, and keeps the rows."""

    def __init__(self) -> None:
        parser = ArgumentParser(description=str(__doc__).splitlines()[0])
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
        parser.add_argument("--only", metavar="TEXT", help="only calls whose text contains TEXT")
        parser.add_argument("--shape", action="append", metavar="NAME", help="only this shape; may be repeated")
        parser.add_argument("--once", action="store_true", help="make each call once, and time nothing")
        parser.add_argument("--rounds", type=int, default=5, help="rounds of each row; those that look slow get more")
        parser.add_argument("--all", action="store_true", help="print all rows")
        parser.add_argument("--against", type=Path, metavar="PATH", help="a second checkout, to compare with")
        self.options = parser.parse_args()
        self.modules: dict[str, Any] = dict(modules())
        if self.options.against:
            self.modules[BASE] = _other_checkout(self.options.against)
        self.rows: list[dict[str, Any]] = []
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        for m in self.modules.values():
            m.benchmark_classes = classes(m)

    def shape(self, kind: str, tree: Callable[[], Tree], make: Callable[[Any, Tree], Any]) -> None:
        source = tree()
        for text in CALLS:
            if self.options.only and self.options.only not in text:
                continue
            if (text in FIELDS and "tensorclass" not in kind) or (text in ELEMENTS and "lazy" not in kind):
                continue
            if text in OPEN and "tensorclass" in kind:
                continue
            if text in WIDE and kind.split(",")[0] in ("1 element", "60 leaves", "40 levels", "tensorclass"):
                continue
            runs: dict[str, Run] = {}
            errors: dict[str, str] = {}
            for name, m in self.modules.items():
                made = lambda m=m: make(m, fresh_copy(source))  # noqa: E731
                one = partial(compiled(text), td := made(), Given(m, td, made))
                try:
                    one()
                    one()  # a call may change the container: it must still work then
                    runs[name] = one
                except Exception as error:  # what one candidate cannot do must not end the run
                    errors[name] = f"{type(error).__name__}: {str(error)[:120]}"
            if PEER in errors and OURS in errors:
                continue  # not for this shape
            row = {"shape": kind, "call": text, "errors": errors, "seconds": {}}
            if not self.options.once:
                row["seconds"] = self.time(runs)
            self.rows.append(row)
            self.show(row)

    def time(self, runs: dict[str, Run]) -> dict[str, float]:
        """Return the least CPU time of each candidate, in seconds a call."""
        clock = time.thread_time_ns
        calls, least = {}, dict.fromkeys(runs, float("inf"))
        for name, run in runs.items():
            start = clock()
            run()
            calls[name] = max(1, min(400, int(400_000 / max(1, clock() - start))))
        done, rounds, turns = 0, self.options.rounds, list(runs.items())
        gc.disable()
        try:
            while done < rounds:
                first = done % len(turns)  # none is favoured by its place in the round
                for name, run in turns[first:] + turns[:first]:
                    n = calls[name]
                    run()  # what ran before was another candidate
                    start = clock()
                    for _ in range(n):
                        run()
                    least[name] = min(least[name], (clock() - start) / n / 1e9)
                done += 1
                if done == self.options.rounds and PEER in least and OURS in least:
                    rounds *= 4 if least[PEER] < 1.05 * least[OURS] else 1  # a closer look
        finally:
            gc.enable()
        return least

    def show(self, row: dict[str, Any]) -> None:
        seconds, errors = row["seconds"], row["errors"]
        if OURS in errors:
            print(f"{row['shape']:<20} {row['call']:<52} ours: {errors[OURS]}", flush=True)
        elif ratio(row) is not None and (self.options.all or ratio(row) < 1):
            before = f"{1e6 * seconds[BASE]:>10.2f}" if BASE in seconds else ""
            peer, ours = 1e6 * seconds[PEER], 1e6 * seconds[OURS]
            print(f"{row['shape']:<20} {row['call']:<52} {peer:>10.2f} {before} {ours:>10.2f} {ratio(row):>7.2f}x",
                  flush=True)  # fmt: skip

    def finish(self) -> int:
        """Print the means and write the JSON file; return 1 if ours could not do what the peer can."""
        print(f"\n{'shape':<20} {'rows':>5} {'peer/ours':>10} {'least':>7} {'below 1x':>9}")
        summary = {}
        for kind in [*dict.fromkeys(row["shape"] for row in self.rows), "all"]:
            ratios = [r for row in self.rows if kind in (row["shape"], "all") and (r := ratio(row)) is not None]
            if ratios:
                mean, below = geomean(ratios), sum(r < 1 for r in ratios)
                summary[kind] = {"rows": len(ratios), "peer_over_ours": mean, "least": min(ratios), "below": below}
                print(f"{kind:<20} {len(ratios):>5} {mean:>9.2f}x {min(ratios):>6.2f}x {below:>9}")
        before = [r["seconds"][BASE] / r["seconds"][OURS] for r in self.rows if {BASE, OURS} <= r["seconds"].keys()]
        if before:
            print(f"base/ours: {geomean(before):.3f}x")
        if self.options.json:
            self.options.json.write_text(json.dumps({"summary": summary, "rows": self.rows}, indent=1))
        failed = [f"{row['call']} ({row['shape']})" for row in self.rows if OURS in row["errors"]]
        print(f"{len(self.rows)} calls" + (f"; raised in tdstore: {', '.join(failed)}" if failed else ""))
        return 1 if failed else 0


def ratio(row: dict[str, Any]) -> float | None:
    seconds = row["seconds"]
    return seconds[PEER] / seconds[OURS] if PEER in seconds and OURS in seconds else None


def _other_checkout(path: Path) -> types.ModuleType:
    """Import the tdstore of another checkout beside this one."""
    mine = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "tdstore"}
    sys.path.insert(0, str(path))
    try:
        return __import__("tdstore")
    finally:
        sys.path.remove(str(path))
        for name in [n for n in sys.modules if n.split(".")[0] == "tdstore"]:
            del sys.modules[name]
        sys.modules.update(mine)


def main() -> int:
    bench = Bench()
    for kind, (tree, make) in {**SHAPES, **LOCKED}.items():
        if not bench.options.shape or kind in bench.options.shape:
            bench.shape(kind, tree, make)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
