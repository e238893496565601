"""Tensorclasses: making, reading and indexing them, beside the peer and a plain dataclass.

Run `python benchmarks/tensorclass.py` (about 20 seconds), `--quick` for a first look.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
from _harness import FLOOR, OURS, PEER, Bench, Target, modules, own

TARGETS = [Target("make", 1.0), Target("read and write", 1.0), Target("rows", 1.0)]
OBS, REWARD = torch.rand(8, 4), torch.rand(8)


def declared(m: ModuleType) -> type[Any]:
    """The class of the benchmark, of one of the packages."""

    class Step:
        obs: torch.Tensor
        reward: torch.Tensor
        env: str = "pong"
        extra: Any = None

    made: type[Any] = m.tensorclass(Step)  # type: ignore[attr-defined]
    return made


@dataclasses.dataclass
class Floor:
    """What a dataclass of Python's does, without a batch."""

    obs: torch.Tensor
    reward: torch.Tensor
    env: str = "pong"
    extra: Any = None


def main() -> int:
    bench = Bench("Tensorclasses (CPU time per call)", TARGETS)
    classes = {name: declared(m) for name, m in modules().items() if isinstance(m, ModuleType)}
    made = {name: cls(obs=OBS, reward=REWARD, batch_size=[8]) for name, cls in classes.items()}
    floor = Floor(OBS, REWARD)
    nested = {name: modules()[name].TensorDict({"step": obj}, [8]) for name, obj in made.items()}  # type: ignore[attr-defined]

    def row(group: str, name: str, run: Any, plain: Any = None) -> None:
        candidates = {key: partial(own(run), classes[key], made[key], nested[key]) for key in (PEER, OURS)}
        if plain is not None:
            candidates[FLOOR] = plain
        bench.micro(group, name, candidates)

    row(
        "make",
        "constructor",
        lambda c, o, t: c(obs=OBS, reward=REWARD, batch_size=[8]),
        lambda: Floor(obs=OBS, reward=REWARD),
    )
    row("make", "constructor, all fields", lambda c, o, t: c(OBS, REWARD, "x", REWARD, batch_size=[8]))
    row("make", "from_tensordict", lambda c, o, t: c.from_tensordict(o._tensordict))
    row("make", "clone", lambda c, o, t: o.clone())
    row("read and write", "tensor field", lambda c, o, t: o.obs, lambda: floor.obs)
    row("read and write", "string field", lambda c, o, t: o.env, lambda: floor.env)
    row("read and write", "None field", lambda c, o, t: o.extra, lambda: floor.extra)
    row("read and write", "get", lambda c, o, t: o.get("obs"))
    row("read and write", "method of the container", lambda c, o, t: o.batch_size)
    row("read and write", "assign a tensor", lambda c, o, t: setattr(o, "obs", OBS), lambda: setattr(floor, "obs", OBS))
    row("read and write", "inside a TensorDict", lambda c, o, t: t["step"].obs)
    row("rows", "o[0]", lambda c, o, t: o[0])
    row("rows", "o[2:5]", lambda c, o, t: o[2:5])
    row("rows", "o[0] = o[1]", lambda c, o, t: o.__setitem__(0, o[1]))
    row("rows", "stack of 8", lambda c, o, t: torch.stack([o] * 8))
    row("rows", "unbind", lambda c, o, t: o.unbind(0))
    row("rows", "o + 1", lambda c, o, t: o + 1)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
