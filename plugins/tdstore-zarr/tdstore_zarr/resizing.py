"""Changes of the length of a leaf's first dimension: surplus chunks are removed, the last one is filled up."""

from __future__ import annotations

import math

import numpy as np

from tdstore.dtypes import from_numpy
from tdstore.storekit.foreign_strings import leaves_of_values
from tdstore.types import LeafSpec
from tdstore_zarr.codec.metadata import ArrayMeta
from tdstore_zarr.layout import chunking
from tdstore_zarr.layout.grid import strides
from tdstore_zarr.layout.leaf import Leaf
from tdstore_zarr.session import Session

BLOCK = 32 << 20
GROWING = 1 << 20
"""Bytes of a shard of a leaf that grows by few rows: an append writes the last shard again."""


def resize(session: Session, leaf: Leaf, length: int) -> None:
    """Set the length; new rows read as the fill value, also after a shrink."""
    meta = leaf.meta
    old = meta.shape[0]
    if length == old:
        return
    short = length > 2 * meta.chunks[0] or meta.chunks[0] < _growing_rows(meta)
    if short and old <= meta.chunks[0] < length and meta.pipeline is not None:
        # Chunks were cut to a leaf that was small: a long one would have a file for every few rows.
        fresh = _layout_of_longer(session, leaf, length)
        if fresh.chunks[0] > meta.chunks[0]:
            _lay_out_anew(session, leaf, fresh)
            return
    if length < old:
        _shrink(session, leaf, length)
    # Objects are numbered with the first dimension outermost: their numbers stay.
    session.buffers.flush()
    meta.shape = (length, *meta.shape[1:])
    leaf.renew()


def _shrink(session: Session, leaf: Leaf, length: int) -> None:
    session.buffers.flush()
    meta = leaf.meta
    each, stride = meta.chunks[0], max(1, strides(meta.grid)[0] if 0 not in meta.grid else 1)
    gone = [number for number in leaf.objects if number // stride * each >= length]
    session.reader.forget(leaf)
    session.place.engine.delete([leaf.key(number) for number in gone])
    for number in gone:
        del leaf.objects[number]
    edge = length // each
    if not length % each or all(number // stride != edge for number in leaf.objects):
        return
    stop = min(meta.shape[0], (edge + 1) * each)
    rows = max(1, BLOCK // max(1, leaf.spec.nbytes // max(1, meta.shape[0])))
    fill = np.frombuffer(meta.fill, np.dtype(meta.data_type))[0]
    for start in range(length, stop, rows):
        end = min(start + rows, stop)
        value = from_numpy(np.full((end - start, *meta.shape[1:]), fill), meta.dtype)
        session.write((leaf, (slice(start, end, 1),), value))


def _growing_rows(meta: ArrayMeta) -> int:
    """Return the rows of a shard of a leaf that grows by few rows."""
    return GROWING // max(1, math.prod(meta.shape[1:]) * meta.dtype.itemsize)


def _layout_of_longer(session: Session, leaf: Leaf, length: int) -> ArrayMeta:
    """Return the metadata of a leaf that has begun to grow: chunks as of a long one, by its own options."""
    meta, path = leaf.meta, leaf.path
    assert meta.pipeline is not None
    rows = max(length, _growing_rows(meta))
    compressors = "none" if meta.pipeline.compressor is None else dict(meta.pipeline.compressor)
    spec = LeafSpec(
        (rows, *meta.shape[1:]), meta.dtype, fill_value=leaf.spec.fill_value,
        compressors=compressors, checksum=meta.pipeline.crc, **chunking.uncut_options(meta),
    )  # fmt: skip
    columns = leaves_of_values({p: other.spec for p, other in session.document.leaves.items()})
    fresh = chunking.fit(spec, {}, session.url, path, meta.keys, column=path in columns)
    fresh.shape = (length, *meta.shape[1:])
    fresh.fill, fresh.attributes, fresh.names = meta.fill, meta.attributes, meta.names
    return fresh


def _lay_out_anew(session: Session, leaf: Leaf, fresh: ArrayMeta) -> None:
    meta, path, node = leaf.meta, leaf.path, leaf.node
    values = session.read_whole(leaf) if leaf.objects or session.buffers else None
    session.unlink(path)
    session.names.put(path, node)
    new = Leaf(path, node, fresh)
    session.add(new)
    if values is not None and values.size:
        session.write((new, (slice(0, meta.shape[0], 1),), from_numpy(values, meta.dtype)))
