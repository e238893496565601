"""Copy between stores in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Mapping

from tdstore.io.blocks import BLOCK_BYTES, leaf_batches
from tdstore.io.progress import Progress
from tdstore.store import Cap, Store
from tdstore.types import LeafSpec, Path, Read, Write


def copy_leaves(
    source: Store, target: Store, specs: Mapping[Path, LeafSpec], *, progress: bool = False, label: str = "copy"
) -> None:
    """Copy leaves that `target` has created already. The caller commits with `save_header`."""
    partial = Cap.PARTIAL_READ in source.caps and Cap.PARTIAL_WRITE in target.caps
    limit = BLOCK_BYTES if partial else max([BLOCK_BYTES, *(s.nbytes for s in specs.values())])
    total = sum(s.nbytes for s in specs.values())
    with Progress(total, label, progress) as bar:
        for batch in leaf_batches(specs, limit):
            values = source.read([Read(path, index) for path, index in batch])
            target.write([Write(path, index, value) for (path, index), value in zip(batch, values, strict=True)])
            bar.advance(sum(v.nbytes for v in values))
