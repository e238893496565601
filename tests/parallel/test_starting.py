"""What a process that starts afresh ("spawn") is given: temporary files of the parent go as their bytes.

torch hands tensors over as file descriptors, and those of copies that were made for the message are closed before the
process has them. The pickler of `multiprocessing` is called here as `Process.start` calls it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict


class Starting:
    """Stand-in for the `Popen` of a process that starts: notes the descriptors that it is to inherit."""

    def __init__(self) -> None:
        self.inherited: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.inherited.append(fd)
        return fd

    def DupFd(self, fd: int) -> int:  # noqa: N802  # the name that multiprocessing calls
        return fd


@pytest.fixture
def starting() -> Iterator[Starting]:
    popen = Starting()
    set_spawning_popen(popen)
    yield popen
    set_spawning_popen(None)


def temporary() -> TensorDict:
    entries = {"a": torch.arange(6.0).reshape(3, 2), "n": {"b": torch.tensor([True, False, True])}}
    return TensorDict(entries, [3]).memmap_()


SENT: dict[str, Callable[[], Any]] = {
    "whole": temporary,
    "rows": lambda: temporary()[1:],
    "first rows": lambda: temporary()[:2],
    "some keys": lambda: temporary().select("a"),
    "other dtypes": lambda: TensorDict(
        {"c": torch.ones(2, dtype=torch.complex64), "e": torch.zeros(2, 0)}, [2]
    ).memmap_(),
    "lazy stack": lambda: tdstore.lazy_stack([temporary(), temporary()]),
    "tensor": lambda: TensorDict({"x": temporary()["a"]}, [3]),
}


@pytest.mark.parametrize("kind", SENT)
def test_temporary_files_go_as_their_bytes(kind: str, starting: Starting) -> None:
    td = SENT[kind]()
    message = io.BytesIO()
    ForkingPickler(message, pickle.HIGHEST_PROTOCOL).dump(td)
    assert starting.inherited == []
    set_spawning_popen(None)
    found = pickle.loads(message.getvalue())
    assert tdstore.assert_close(found, td, rtol=0, atol=0)
    assert not any(leaf.is_shared() for leaf in found.values(True, True))
