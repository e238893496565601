"""Creation of datasets: contiguous and allocated at once unless the options require chunks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from tdstore.dtypes import dtype_name, is_bit_pattern, numpy_dtype
from tdstore.errors import OptionError
from tdstore.storekit.checked import fill_pattern
from tdstore.storekit.checksums import BLOCK
from tdstore.storekit.files import io_errors, write_at
from tdstore.types import LeafSpec, Path, path_text
from tdstore_h5.faults import h5_errors
from tdstore_h5.file.handle import Handle
from tdstore_h5.file.tree import DTYPE_ATTRIBUTE, Leaf, Walker
from tdstore_h5.options import CHUNKED
from tdstore_h5.rows.contiguous import RawFile

HELD = 4 << 20
"""New leaves up to so many bytes may wait in memory for the commit."""
TRIES = 4
HIDDEN = "%new-"
"""How the name of a dataset begins that is only there for a moment."""


def make(
    handle: Handle, raw: RawFile, path: Path, name: str, spec: LeafSpec, options: Mapping[str, Any], walker: Walker
) -> Leaf:
    """Create one dataset that reads as its fill value, and describe it.

    Args:
        handle: the open file.
        raw: its bytes.
        path: the leaf.
        name: the name of the dataset.
        spec: the spec of the leaf.
        options: its layout options.
        walker: describes the dataset.
    """
    before = raw.size()
    leaf = _make(handle.file, raw, path, name, spec, options, walker)
    places: list[str] = []
    while _is_low(leaf, handle) and spec.nbytes > HELD and len(places) < TRIES:
        # HDF5 gave it room that the last commit uses. Beyond that the rows can be written at once.
        places.append(HIDDEN + secrets.token_hex(6))
        with h5_errors(raw.url, f"creating {path_text(path)}"):
            handle.file.move(name, places[-1])
        leaf = _make(handle.file, raw, path, name, spec, options, walker)
    for place in places:
        with h5_errors(raw.url, f"creating {path_text(path)}"):
            del handle.file[place]
    _clear(handle, raw, leaf, before)
    return leaf


def _is_low(leaf: Leaf, handle: Handle) -> bool:
    return leaf.offset is not None and leaf.offset < handle.committed


def _make(
    file: h5py.File, raw: RawFile, path: Path, name: str, spec: LeafSpec, options: Mapping[str, Any], walker: Walker
) -> Leaf:
    pattern = fill_pattern(spec, raw.url)
    fill = np.frombuffer(pattern, numpy_dtype(spec.dtype))
    chunked = not options.keys().isdisjoint(CHUNKED)
    with h5_errors(raw.url, f"creating {path_text(path)}", OptionError):
        if chunked:
            extra = {"fillvalue": fill[0]} if any(pattern) else {}
            dataset = file.create_dataset(name, spec.shape, fill.dtype, **extra, **options).id
        else:
            dataset = _contiguous(file, name, spec, fill, options)
        if is_bit_pattern(spec.dtype):
            text = np.bytes_(dtype_name(spec.dtype))
            h5py.Dataset(dataset).attrs.create(DTYPE_ATTRIBUTE.decode(), text)
        return walker.leaf(
            path,
            name.encode(),
            dataset,
            dataset.get_type(),
            dataset.get_create_plist().get_layout() == h5d.CONTIGUOUS,
            dataset.get_create_plist(),
        )


def _contiguous(
    file: h5py.File, name: str, spec: LeafSpec, fill: np.ndarray[Any, Any], options: Mapping[str, Any]
) -> h5d.DatasetID:
    plist = h5p.create(h5p.DATASET_CREATE)
    # Allocated at once, so that its place in the file is known, but not written: the file has a hole there.
    plist.set_layout(h5d.CONTIGUOUS)
    plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(bool(options.get("track_times", False)))
    if fill.tobytes().strip(b"\0"):
        plist.set_fill_value(fill)
    links = h5p.create(h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5t.CSET_UTF8)
    kind = h5t.py_create(fill.dtype, logical=True)
    space = h5s.create_simple(spec.shape) if spec.shape else h5s.create(h5s.SCALAR)
    return h5d.create(file.id, name.encode(), kind, space, plist, links)


def _clear(handle: Handle, raw: RawFile, leaf: Leaf, before: int) -> None:
    """Fill the space of a new dataset with its fill value: HDF5 may reuse space with old bytes."""
    offset, nbytes = leaf.offset, leaf.spec.nbytes
    if offset is None or not nbytes:
        return
    pattern = fill_pattern(leaf.spec, raw.url)
    if _is_low(leaf, handle):
        leaf.held = True
        fill = np.frombuffer(pattern, numpy_dtype(leaf.spec.dtype))
        with h5_errors(raw.url, "filling a new leaf"):
            _fill(handle.file[leaf.name], leaf.spec, fill)
        return
    with io_errors(raw.url, "filling a new leaf"):
        if any(pattern):
            raw.fill(offset, pattern, nbytes)
        elif offset < before:
            raw.fill(offset, bytes(64), min(nbytes, before - offset))
        # A mapping must not reach beyond the end of the file; HDF5 would extend it at its next flush only.
        if raw.size() < offset + nbytes:
            os.ftruncate(raw.fd, offset + nbytes)


def _fill(dataset: h5py.Dataset, spec: LeafSpec, fill: np.ndarray[Any, Any]) -> None:
    if not spec.shape:
        dataset[()] = fill[0]
        return
    step = max(1, BLOCK * spec.shape[0] // spec.nbytes)
    for start in range(0, spec.shape[0], step):
        stop = min(start + step, spec.shape[0])
        dataset[start:stop] = np.broadcast_to(fill[0], (stop - start, *spec.shape[1:]))


def relengthen(dataset: h5py.Dataset, old: int, length: int) -> bool:
    """Set the length of a dataset whose first `old` rows are kept; return False if it has no chunks, or a limit."""
    if not dataset.chunks:
        return False
    space = dataset.id.get_space()
    (there, *rest), most = space.get_simple_extent_dims(), space.get_simple_extent_dims(True)[0]
    if most != h5s.UNLIMITED and most < length:
        return False
    if there > old:  # rows of a writer that was killed are not among the new ones
        dataset.id.set_extent((old, *rest))
    dataset.id.set_extent((length, *rest))
    return True


def options_of(dataset: h5py.Dataset) -> dict[str, Any]:
    """Return the layout options that would make an equal dataset, able to grow."""
    names = ("chunks", "compression", "compression_opts", "shuffle", "fletcher32", "scaleoffset")
    options = {name: getattr(dataset, name) for name in names}
    options = {name: value for name, value in options.items() if value not in (None, False)}
    if dataset.chunks:
        options["maxshape"] = (None, *dataset.maxshape[1:])
    return options


def copy_bytes(raw: RawFile, source: int, target: int, size: int) -> None:
    """Copy within the file, in blocks; `target` is new space."""
    with io_errors(raw.url, "copying a leaf"):
        for start in range(0, size, BLOCK):
            count = min(BLOCK, size - start)
            if not raw.is_hole(source + start, count):
                write_at(raw.fd, raw.bytes_at(source + start, count).data, target + start)


def allocate(handle: Handle, raw: RawFile, path: Path, leaf: Leaf) -> None:
    """Allocate a dataset of another program that was never written, so that it can be written in place."""
    with h5_errors(raw.url, f"allocating {path_text(path)}"):
        before = raw.size()
        dataset = handle.file[leaf.name]
        dataset[(0,) * len(leaf.spec.shape)] = dataset.fillvalue
        handle.file.flush()
        leaf.offset, leaf.stored, leaf.committed = dataset.id.get_offset(), dataset.id.get_storage_size(), None
    if leaf.offset is None:
        leaf.plain = False  # written through HDF5 then
        return
    _clear(handle, raw, leaf, before)
