"""In-memory operations on TensorDicts of other sizes and kinds, beside the peer: where is ours slower?

Run `python benchmarks/sizes.py` (a minute of CPU time). Each operation runs on each kind of TensorDict; those that a
kind does not have are left out. The summary has a geometric mean a kind.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _harness import OURS, PEER, Bench, modules, own

Tree = dict[str, Any]


def flat(leaves: int, batch: tuple[int, ...], features: int = 4) -> Tree:
    """Half of the leaves floats, the others counts and marks, as in steps of an environment."""
    makers: list[Callable[[], torch.Tensor]] = [
        lambda: torch.rand(*batch, features),
        lambda: torch.randint(0, 9, batch) if batch else torch.tensor(3),
        lambda: torch.rand(*batch, features, 2),
        lambda: torch.zeros(*batch, 1, dtype=torch.bool),
    ]
    return {f"k{i}": makers[i % 4]() for i in range(leaves)}


def nested(depth: int, batch: tuple[int, ...]) -> Tree:
    tree = flat(2, batch)
    for _ in range(depth - 1):
        tree = {**flat(2, batch), "n": tree}
    return tree


KINDS: dict[str, tuple[Callable[[], Tree], tuple[int, ...], dict[str, Any]]] = {
    "1 leaf": (lambda: flat(1, (8,)), (8,), {}),
    "6 leaves": (lambda: flat(6, (8,)), (8,), {}),
    "30 leaves": (lambda: flat(30, (8,)), (8,), {}),
    "300 leaves": (lambda: flat(300, (8,)), (8,), {}),
    "depth 2": (lambda: nested(2, (8,)), (8,), {}),
    "depth 5": (lambda: nested(5, (8,)), (8,), {}),
    "no batch": (lambda: flat(6, ()), (), {}),
    "3 batch dims": (lambda: flat(6, (4, 3, 2)), (4, 3, 2), {}),
    "4,096 rows": (lambda: flat(6, (4096,), 32), (4096,), {}),
    "locked": (lambda: nested(2, (8,)), (8,), {"lock": True}),
    "names": (lambda: nested(2, (8,)), (8,), {"names": ["t"]}),
    "device": (lambda: nested(2, (8,)), (8,), {"device": "cpu"}),
    "strings": (lambda: {**nested(2, (8,)), "s": "text", "u": "other"}, (8,), {}),
    "gradients": (lambda: {"w": torch.rand(8, 3).requires_grad_(), "b": torch.rand(8).requires_grad_()}, (8,), {}),
}
Call = Callable[[Any, Any], object]
ROWS = torch.tensor([1, 0, 3])
MASK = torch.tensor([True, False] * 4)
BATCH = {"td[0]", "td[1:3]", "td[None]", "td[..., 0]", "td[list]", "td[rows]", "td[mask]", "td[0] =", "td[1:3] =",
         "td[rows] =", "view", "reshape", "unbind", "split", "stack", "cat", "squeeze"}  # fmt: skip
"""Operations that need a batch dimension."""
FREE = {"set", "pop and set", "lock and unlock"}
"""Operations that need an unlocked TensorDict."""
CALLS: dict[str, Call] = {
    "td[key]": lambda td, o: td["k0"] if "k0" in td else td["w"],
    "get": lambda td, o: td.get("k0", None),
    "set": lambda td, o: td.set("new", o),
    "pop and set": lambda td, o: td.set("k0", td.pop("k0")) if "k0" in td else None,
    "keys": lambda td, o: list(td.keys()),
    "items": lambda td, o: list(td.items()),
    "keys(T, T)": lambda td, o: list(td.keys(True, True)),
    "values(T, T)": lambda td, o: list(td.values(True, True)),
    "contains": lambda td, o: "k0" in td.keys(),  # noqa: SIM118  (of a TensorDict)
    "batch_size": lambda td, o: td.batch_size,
    "is_empty": lambda td, o: td.is_empty(),
    "numel": lambda td, o: td.numel(),
    "td[0]": lambda td, o: td[0],
    "td[1:3]": lambda td, o: td[1:3],
    "td[None]": lambda td, o: td[None],
    "td[..., 0]": lambda td, o: td[..., 0],
    "td[list]": lambda td, o: td[[0, 2]],
    "td[rows]": lambda td, o: td[ROWS],
    "td[mask]": lambda td, o: td[MASK],
    "view": lambda td, o: td.view(-1),
    "reshape": lambda td, o: td.reshape(-1, 2),
    "unsqueeze": lambda td, o: td.unsqueeze(0),
    "squeeze": lambda td, o: td.squeeze(),
    "expand": lambda td, o: td.expand(2, *td.batch_size),
    "unbind": lambda td, o: td.unbind(0),
    "split": lambda td, o: td.split(2),
    "stack": lambda td, o: torch.stack([td, td, td]),
    "cat": lambda td, o: torch.cat([td, td, td]),
    "clone": lambda td, o: td.clone(),
    "clone(False)": lambda td, o: td.clone(False),
    "copy": lambda td, o: td.copy(),
    "empty": lambda td, o: td.empty(),
    "select": lambda td, o: td.select(next(iter(td.keys()))),
    "exclude": lambda td, o: td.exclude("k0"),
    "to_dict": lambda td, o: td.to_dict(),
    "flatten_keys": lambda td, o: td.flatten_keys("."),
    "apply": lambda td, o: td.apply(lambda x: x + 1),
    "detach": lambda td, o: td.detach(),
    "td + 1": lambda td, o: td + 1,
    "td * td": lambda td, o: td * td,
    "td == td": lambda td, o: td == td,
    "to(float64)": lambda td, o: td.to(torch.float64),
    "to('cpu')": lambda td, o: td.to("cpu"),
    "contiguous": lambda td, o: td.contiguous(),
    "sum": lambda td, o: td.sum(),
    "zeros_like": lambda td, o: torch.zeros_like(td),
    "lock and unlock": lambda td, o: td.lock_().unlock_(),
    "pickle": lambda td, o: pickle.loads(pickle.dumps(td)),
}


def main() -> int:
    bench = Bench("Operations on other sizes (CPU time per call)")
    bench.quick = True
    made = modules()
    for kind, (tree, batch, options) in KINDS.items():
        source = tree()
        tds: dict[str, Any] = {}
        for name, module in made.items():
            tds[name] = module.TensorDict(copy.deepcopy(source), batch_size=batch, **options)  # type: ignore[attr-defined]
        extra = torch.zeros(*batch, 2)
        for call, run in CALLS.items():
            if (call in BATCH and not batch) or (call in FREE and options.get("lock")):
                continue
            if call == "td[mask]" and batch[0] != len(MASK):
                continue
            if not works(run, tds, extra):
                continue
            bench.micro(kind, call, {name: partial(own(run), td, extra) for name, td in tds.items()})
        if batch and not options.get("lock") and kind != "gradients":
            write_rows(bench, kind, tds)
    return bench.finish()


def works(run: Call, tds: dict[str, Any], extra: torch.Tensor) -> bool:
    """Whether torch has the operation for these leaves: the peer is asked, or ours where it is alone."""
    try:
        run(tds.get(PEER, tds.get(OURS)).clone(), extra)
    except (RuntimeError, TypeError, NotImplementedError, KeyError, ValueError):
        return False
    return True


def write_rows(bench: Bench, kind: str, tds: dict[str, Any]) -> None:
    for name, index in (("td[0] =", 0), ("td[1:3] =", slice(1, 3)), ("td[rows] =", ROWS)):
        values = {key: td[index].clone() for key, td in tds.items()}
        bench.micro(
            kind, name,
            {key: partial(td.__setitem__, index, values[key]) for key, td in tds.items()},
        )  # fmt: skip
    if kind != "names":
        bench.micro(kind, "update", {key: partial(td.update, td.clone()) for key, td in tds.items()})
        bench.micro(kind, "update_", {key: partial(td.update_, td.clone()) for key, td in tds.items()})


if __name__ == "__main__":
    sys.exit(main())
