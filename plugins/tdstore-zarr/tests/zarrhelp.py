"""What the tests of this plugin share."""

from __future__ import annotations

from typing import Any

import torch
from tdstore_zarr.store import ZarrStore, open_zarr
from torch import Tensor

from tdstore.header import Group, Header
from tdstore.types import LeafSpec, Path, Read, Write


def save(path: Any, leaves: dict[Path, Tensor], *, values: dict[str, Any] | None = None, **options: Any) -> None:
    with open_zarr(path, mode="w", **options) as store:
        fill(store, leaves)
        store.save_header(header_of(leaves, values))


def fill(store: ZarrStore, leaves: dict[Path, Tensor], **layout: Any) -> None:
    store.create({p: LeafSpec(t.shape, t.dtype, **layout) for p, t in leaves.items()})
    store.write([Write(p, (), t) for p, t in leaves.items()])


def header_of(leaves: dict[Path, Tensor], values: dict[str, Any] | None = None) -> Header:
    keys: dict[Path, list[str]] = {(): []}
    for path in leaves:
        for depth in range(len(path)):
            keys.setdefault(path[:depth], [])
            if path[depth] not in keys[path[:depth]]:
                keys[path[:depth]].append(path[depth])
    envelopes = {key: {"data": value} for key, value in (values or {}).items()}
    keys[()] += envelopes
    return Header({p: Group(batch_size=(), keys=tuple(k), values={} if p else envelopes) for p, k in keys.items()})


def load(path: Any, **options: Any) -> dict[Path, Tensor]:
    with open_zarr(path, **options) as store:
        return everything(store)


def everything(store: ZarrStore) -> dict[Path, Tensor]:
    paths = sorted(store.paths())
    return dict(zip(paths, store.read([Read(p) for p in paths]), strict=True))


def same(a: dict[Path, Tensor], b: dict[Path, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[p].dtype == b[p].dtype and a[p].shape == b[p].shape and bits(a[p]) == bits(b[p]) for p in a
    )


def bits(t: Tensor) -> bytes:
    return bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if t.numel() else b""


def old_and_new() -> tuple[dict[Path, Tensor], dict[Path, Tensor]]:
    old = {("a",): torch.arange(4000.0).view(100, 40), ("n", "b"): torch.arange(100), ("c",): torch.zeros(100).bool()}
    return old, {p: t.clone().add_(1) if t.dtype != torch.bool else ~t for p, t in old.items()}
