"""What the tests of this plugin share."""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path as FsPath
from typing import Any

import torch
from tdstore_remote.store import open_remote

from tdstore import TensorDict
from tdstore.testing.processes import warm

ROOT = FsPath(__file__).resolve().parents[3]


def name() -> str:
    return uuid.uuid4().hex[:12]


def sample(rows: int = 300) -> TensorDict:
    """Rows that tell which they are."""
    numbers = torch.arange(rows)
    return TensorDict(
        {
            "obs": (numbers[:, None] * 7 + torch.arange(2000)).to(torch.int32),
            "action": numbers.clone(),
            "next": {"reward": numbers.to(torch.float32) / 8},
            "about": "a run",
        },
        [rows],
    )


def same(a: Any, b: Any) -> bool:
    """Whether two TensorDicts hold the same."""
    a, b = a.to_tensordict(), b.to_tensordict()
    keys = {k if isinstance(k, tuple) else (k,) for k in a.keys(True, True)}
    if keys != {k if isinstance(k, tuple) else (k,) for k in b.keys(True, True)}:
        return False
    return all(
        torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) and isinstance(b[k], torch.Tensor) else a[k] == b[k]
        for k in keys
    )


def run(code: str, *, seconds: float = 200, env: dict[str, str] | None = None) -> str:
    """Run code in a process of its own, with a deadline; its output."""
    done = subprocess.run(
        [*warm.python(), "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        check=False,
    )
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


__all__ = ["ROOT", "name", "open_remote", "run", "same", "sample"]
