"""What the fault tests of this folder share: children with limits, media by name, headers written by an enemy."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tdstore import TensorDict
from tdstore.errors import StoreError
from tdstore.storekit.documents import seal

MEDIA = ("memmap", "h5", "shared")
PATIENCE = 60
"""Seconds after which a child counts as hanging."""


def location_of(medium: str, folder: Path, name: str = "data") -> str:
    """Where a dataset of that medium goes; `TDSTORE_SHM_DIR` must be set for shared ones."""
    return {"memmap": f"{folder}/{name}", "h5": f"{folder}/{name}.h5", "shared": f"shm://{name}"}[medium]


def start(body: Callable[[], object], *, memory: int | None = None) -> tuple[int, int]:
    """Run in a forked child that may take `memory` more bytes of address space: its pid, and where its answer comes."""
    answer, mine = os.pipe()
    pid = os.fork()
    if pid:
        os.close(mine)
        return pid, answer
    code = 1
    try:
        torch.set_num_threads(1)  # OpenMP's threads are not there in a forked child
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        if memory is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)
        try:
            text = str(body())
        except StoreError as error:
            text = f"{type(error).__name__}: {error}"
        code = 0
    except BaseException:
        text = traceback.format_exc()
        sys.stderr.write(text)
    finally:
        with suppress(OSError):
            os.write(mine, text.encode()[:60000])
        os._exit(code)


def ended(started: tuple[int, int]) -> str:
    """What a child answered: its result, or the `StoreError` that it met. Anything else fails the test."""
    pid, answer = started
    with os.fdopen(answer, "rb") as pipe:
        text = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, f"the child ended with {code}: {text}"
    return text


def in_child(body: Callable[[], object], *, memory: int | None = None) -> str:
    """`start` and `ended` in one."""
    return ended(start(body, memory=memory))


def body_of(document: bytes) -> bytes:
    """The JSON of a document below its seal."""
    return document.split(b"\n", 1)[1]


def put_document(td: Any, medium: str, location: str, change: Callable[[bytes], bytes]) -> None:
    """Change the document that describes a dataset; the result has valid checksums.

    `td` is the container that made it: the owner, where it is shared memory.
    """
    if medium == "memmap":
        file = Path(location) / "tdstore.json"
        file.write_bytes(seal(change(body_of(file.read_bytes()))))
    elif medium == "shared":
        arena = td._binding[0].store._arena
        generation, offset, length, _, _ = max(r for r in arena._records() if r)
        assert generation == arena.generation()
        arena.commit(change(arena._bytes(offset, length)))
    else:
        _put_h5(location, change)


def _put_h5(location: str, change: Callable[[bytes], bytes]) -> None:
    import h5py
    from tdstore_h5.file.document import MANIFEST, get_attribute, put_attribute

    with h5py.File(location, "r+") as file:
        text = get_attribute(file.attrs, MANIFEST, location)
        assert text is not None
        text = text.encode() if isinstance(text, str) else text
        put_attribute(file, MANIFEST, seal(change(body_of(text))))


def with_header(raw: bytes) -> Callable[[bytes], bytes]:
    """A change that puts other JSON in place of the header."""

    def change(body: bytes) -> bytes:
        document = json.loads(body)
        document["header"] = "@@HEADER@@"
        return json.dumps(document).encode().replace(b'"@@HEADER@@"', raw)

    return change


def with_groups(edit: Callable[[list[Any]], object]) -> Callable[[bytes], bytes]:
    """A change of the list of group records."""

    def change(body: bytes) -> bytes:
        document = json.loads(body)
        edit(document["header"]["groups"])
        return json.dumps(document).encode()

    return change


def look_at_everything(location: str) -> str:
    """What a careless user of somebody else's dataset does."""
    with TensorDict.load(location) as td:
        keys = [str(key) for key in td.keys(include_nested=True)]
        repr(td)
        for key, value in td.items(include_nested=True, leaves_only=True):
            assert isinstance(value, torch.Tensor), key
        for key in td.keys():
            td.get(key)
        if td.batch_size and td.batch_size[0]:
            td[0].to_tensordict()
        td.to_dict()
        return f"opened: {' '.join(keys)}"
