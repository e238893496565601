"""Count the Python calls into tdstore and its plugins that common operations on stores make.

Run `python benchmarks/routes.py` (a few seconds) for the table, `--tree NAME` for the calls of one route, with the file
of each. A count does not depend on the machine, only on the version of Python.

`store` are the calls below a method of the store itself, which do what its format needs; `core` is the rest: finding
the backend, the index, the plan, the catalogue.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import tdstore
from tdstore import TensorDict
from tdstore.store import Store

ROOT = Path(__file__).resolve().parents[1]
OURS = (str(ROOT / "tdstore"), str(ROOT / "plugins"))
Run = Callable[[], object]


@dataclass
class Counted:
    """The calls of one operation, in order: their depth, their code, and whether a store's method was above them."""

    calls: list[tuple[int, CodeType, bool]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.calls)

    @property
    def store(self) -> int:
        return sum(inside for _, _, inside in self.calls)

    @property
    def core(self) -> int:
        return self.total - self.store

    def tree(self) -> Iterator[str]:
        for depth, code, inside in self.calls:
            place = code.co_filename.removeprefix(str(ROOT) + "/")
            yield f"{'|' if inside else ' '} {'  ' * depth}{code.co_qualname}  {place}:{code.co_firstlineno}"


METHODS = {name for name, made in vars(Store).items() if not name.startswith("_") and callable(made)}


def counted(run: Run) -> Counted:
    """Run an operation and count what it calls of ours."""
    out = Counted()
    depth, inside = 0, 0  # inside: the depth at which a store was entered

    def mine(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(OURS)

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal depth, inside
        if event == "call" and mine(frame):
            depth += 1
            if not inside and _of_store(frame):
                inside = depth
            out.calls.append((depth, frame.f_code, bool(inside)))
        elif event == "return" and mine(frame):
            if depth == inside:
                inside = 0
            depth -= 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return out


def _of_store(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name in METHODS and isinstance(frame.f_locals.get("self"), Store)


# --- the routes ---


def batch(rows: int) -> TensorDict:
    """Three leaves in two groups: a transition."""
    following = TensorDict({"obs": torch.zeros(rows, 4)}, [rows])
    return TensorDict({"obs": torch.zeros(rows, 4), "action": torch.zeros(rows), "next": following}, [rows])


@contextmanager
def routes() -> Iterator[dict[str, Run]]:
    """Each operation by name; every one may be run again."""
    rows = torch.tensor([3, 7, 11, 50])
    data, part = batch(100), batch(4)

    def of_one(kind: str, stored: Any) -> dict[str, Run]:
        return {
            f"{kind} write": lambda: stored.__setitem__(rows, part),
            f"{kind} read": lambda: stored.read(rows),
            f"{kind} get": lambda: stored["obs"],
            f"{kind} get nested": lambda: stored["next", "obs"],
        }

    made: dict[str, Run] = {}
    opened: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, ending in (("memmap", ""), ("h5", ".h5"), ("zarr", ".zarr"), ("objects", "")):
            scheme = "file://" if kind == "objects" else ""
            held, read_only, saved = (f"{scheme}{folder}/{kind}-{use}{ending}" for use in ("held", "read", "saved"))
            data.save(held).close()
            data.save(read_only).close()
            opened.append(tdstore.open(held, mode="r+"))
            made |= of_one(kind, opened[-1])

            def save(saved: str = saved) -> None:
                opened.append(data.save(saved))

            def open_and_read(location: str = read_only) -> None:
                td = tdstore.open(location)
                td.read(rows)
                td.close()

            made |= {f"{kind} save": save, f"{kind} open": open_and_read}
        made["memory save"] = lambda: opened.append(data.save("memory://b/run"))
        try:
            yield made
        finally:
            for td in opened:
                td.close()


def measure(run: Run) -> Counted:
    """The calls of the second run: the first one imports and fills caches."""
    run()
    return counted(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", metavar="NAME", help="print the calls of one route, those of the store after '|'")
    chosen = parser.parse_args().tree
    warnings.simplefilter("ignore")
    with routes() as every:
        if chosen is not None:
            print("\n".join(measure(every[chosen]).tree()))
            return
        print(f"{'route':22} {'calls':>6} {'store':>6} {'core':>6} {'files':>6}")
        for name, run in every.items():
            found = measure(run)
            files = len({code.co_filename for _, code, _ in found.calls})
            print(f"{name:22} {found.total:6} {found.store:6} {found.core:6} {files:6}")


if __name__ == "__main__":
    main()
