"""Partial copies: the mark in their header, because of which readers refuse them and a later run can finish them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from tdstore.errors import CorruptStoreError, DirtyStoreError
from tdstore.header import Group, Header, encode_header
from tdstore.registry import split_scheme
from tdstore.store import Cap, Store
from tdstore.types import LeafSpec, Path, Read, path_text
from tdstore.values import encode_value

KEY = "tdstore.copy"
"""Name of the mark among the `extra` of the root group."""
_SAMPLED_LEAVES = 256
_SAMPLED_BYTES = 64 << 10


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Progress of a copy."""

    source: str
    """URL of the source."""
    state: str
    """`fingerprint` of the source when the copy began."""
    plan: str
    """`plan_name` of the copy: its leaves, their order, its options."""
    block_bytes: int
    done: int
    """Number of batches that are durable in the target."""
    of: int
    at: tuple[str, ...]
    """The leaf where the next batch begins."""


def with_mark(groups: Mapping[Path, Group], mark: Mark) -> Header:
    """Return the header of a partial copy."""
    root = groups[()]
    extra = {**root.extra, KEY: msgspec.to_builtins(mark)}
    return Header({**groups, (): msgspec.structs.replace(root, extra=extra)})


def mark_of(header: Header, url: str) -> Mark | None:
    """Return the mark in a header; None for the header of a complete dataset.

    Raises:
        CorruptStoreError: the mark is malformed.
    """
    root = header.groups.get(())
    if root is None or KEY not in root.extra:
        return None
    try:
        return msgspec.convert(root.extra[KEY], Mark)
    except msgspec.ValidationError as error:
        raise CorruptStoreError(f"{url} has a malformed mark of a copy: {error}", url=url) from error


def incomplete(mark: Mark, url: str) -> DirtyStoreError:
    """Create the error for opening a partial copy."""
    return DirtyStoreError(
        f"{url} is an incomplete copy of {mark.source}: {mark.done} of {mark.of} blocks are there, "
        f"the next is of {path_text(mark.at)}",
        leaves=(mark.at,),
        url=url,
        hint=f"run the same tdstore.copy({mark.source!r}, {url!r}, ...) again to finish it; "
        "mode='w' replaces it by something else",
    )


# -- identity of a copy -----------------------------------------------------------


def plan_name(
    specs: Mapping[Path, LeafSpec], chunks: Mapping[Path, Any], options: Mapping[str, Any], blocks: tuple[int, int]
) -> str:
    """Name a plan: leaves with their options and chunks, options of the target, number of blocks."""
    parts = [
        (path, spec.shape, spec.dtype, _described(spec.fill_value), _described(dict(spec.options)), chunks.get(path))
        for path, spec in specs.items()
    ]
    described = [(name, _described(value)) for name, value in sorted(options.items()) if name != "storage_options"]
    return _digest(repr((parts, described, blocks)).encode())


def _described(value: object) -> str:
    try:
        return repr(encode_value(value))
    except (TypeError, ValueError):
        return type(value).__qualname__  # a client, say: its repr differs from run to run


def fingerprint(store: Store, location: object, groups: Mapping[Path, Group], specs: Mapping[Path, LeafSpec]) -> str:
    """Return a fingerprint that differs between a source and the same source after a change.

    It covers the header and the specs; for local files also names, sizes and times; for others, the first,
    middle and last row of leaves whose rows are short.
    """
    data = [encode_header(Header(groups)), repr([(p, s.shape, s.dtype) for p, s in specs.items()]).encode()]
    path = local_path(location)
    if path is not None and os.path.lexists(path):
        data.append(repr(sorted(_files(path))).encode())
    elif Cap.PARTIAL_READ in store.caps:
        data += _samples(store, specs)
    return _digest(*data)


def local_path(location: object) -> str | None:
    """Return the path of a location on this machine's file system; None for other locations."""
    if not isinstance(location, (str, os.PathLike)):
        return None
    text = os.fspath(location)
    if not isinstance(text, str) or "::" in text or "\0" in text:
        return None
    return os.path.realpath(os.path.expanduser(split_scheme(text)[1]))


def _files(path: str) -> Iterator[tuple[str, int, int]]:
    if not os.path.isdir(path):
        info = os.stat(path)
        yield "", info.st_size, info.st_mtime_ns
        return
    for folder, _, names in os.walk(path):
        for name in names:
            info = os.lstat(os.path.join(folder, name))
            yield os.path.relpath(os.path.join(folder, name), path), info.st_size, info.st_mtime_ns


def _samples(store: Store, specs: Mapping[Path, LeafSpec]) -> list[bytes]:
    reads = []
    for path, spec in specs.items():
        if spec.shape and spec.nbytes and spec.nbytes // spec.shape[0] <= _SAMPLED_BYTES:
            last = spec.shape[0] - 1
            reads.append(Read(path, (torch.tensor(sorted({0, last // 2, last}), device="cpu"),)))
    return [bytes(bits(value).numpy()) for value in store.read(reads[:_SAMPLED_LEAVES])]


def bits(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in C order."""
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def _digest(*parts: bytes) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()
