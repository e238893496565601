"""Chunking of leaves: shards, chunks and compressors, by default or by options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tdstore.dtypes import dtype_name, is_bit_pattern, numpy_dtype
from tdstore.errors import OptionError
from tdstore.storekit import refusals
from tdstore.storekit.checked import fill_pattern
from tdstore.storekit.chunks import check_layout, column_rows, leading_sizes, preset_chunks, wrong_value
from tdstore.storekit.foreign_strings import TEXT
from tdstore.types import LeafSpec, Path, path_text
from tdstore_zarr.codec.codecs import ChunkError, parse_pipeline
from tdstore_zarr.codec.metadata import DTYPE_ATTRIBUTE, MAX_CHUNK, MAX_INNER, SAFE_CODECS, ArrayMeta

_LAYOUT = ("layout", "chunks", "shards")
OPTIONS = (*_LAYOUT, "compressors", "checksum")
LAYOUT_ATTRIBUTE = "tdstore_layout"
"""Attribute of a leaf of one chunk: its options for chunks, which were cut to its length. They count when it grows."""
WIDEST = 4 << 20
LEAST_SHARD, MOST_SHARD, SHARDS = 4 << 20, 64 << 20, 64


def fit(
    spec: LeafSpec, defaults: Mapping[str, Any], url: str, path: Path, keys: tuple[str, str], *, column: bool = False
) -> ArrayMeta:
    """Return the metadata of a new leaf, with options cut to its shape: its own take precedence over the store's.

    Args:
        spec: the spec of the leaf.
        defaults: the options of the store.
        url: the location, for messages.
        path: the leaf.
        keys: the spelling of chunk keys.
        column: whether it is one of the two leaves of a var-length column.

    Raises:
        OptionError: an unknown option, or an impossible value.
    """
    check_names(spec.options, url, path)
    if column:
        defaults = _column_options(path[-1], spec, defaults)
    options = {k: v for k, v in {**defaults, **spec.options}.items() if v is not None}
    where = path_text(path)
    layout = options.get("layout", "random")
    checksum = options.get("checksum", True)
    if type(checksum) is not bool:
        raise wrong_value("checksum", checksum, "True or False", where, url)
    shape, itemsize = spec.shape, spec.dtype.itemsize
    data_type = str(numpy_dtype(spec.dtype))
    attributes: dict[str, Any] = {DTYPE_ATTRIBUTE: dtype_name(spec.dtype)} if is_bit_pattern(spec.dtype) else {}
    inner = _inner(options.get("chunks"), shape, itemsize, layout, url, where)
    chunks = _shard(options.get("shards"), "chunks" in options, inner, shape, itemsize, url, where)
    if shape and shape[0] <= chunks[0] and not column:
        uncut = {name: options[name] for name in _LAYOUT if name in options}
        attributes |= {LAYOUT_ATTRIBUTE: uncut} if uncut else {}
    codecs = _codecs(options.get("compressors"), data_type, checksum, url, where)
    pipeline = parse_pipeline(codecs)
    meta = ArrayMeta(
        shape, spec.dtype, data_type, fill_pattern(spec, url), chunks, inner, chunks != inner, pipeline, codecs,
        keys=keys, attributes=attributes,
    )  # fmt: skip
    if meta.sharded:
        meta.codecs = [sharding(inner, codecs)]
    if pipeline is None:
        meta.inner, meta.sharded = chunks, False
    if math.prod(meta.per_object) > MAX_INNER or meta.inner_bytes > MAX_CHUNK:
        raise OptionError(
            f"{url}: {where} of shape {shape} would have shards of {math.prod(meta.per_object)} chunks of "
            f"{meta.inner_bytes} bytes; the limits are {MAX_INNER} and {MAX_CHUNK}",
            url=url,
            hint="choose other chunks= and shards=",
        )
    return meta


def uncut_options(meta: ArrayMeta) -> dict[str, Any]:
    """Return the options for chunks that the caller gave for a leaf, before they were cut to its length."""
    found = meta.attributes.get(LAYOUT_ATTRIBUTE, {})
    return {name: found[name] for name in _LAYOUT if name in found} if isinstance(found, dict) else {}


def _column_options(name: str, spec: LeafSpec, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for chunks that are cheap to decode: nearly every random row is in a chunk of its own.

    Options for rows do not suit a data leaf, whose "rows" are bytes.
    """
    found = {k: v for k, v in chosen.items() if v is not None and (name != TEXT or k not in ("chunks", "shards"))}
    if found.get("layout", "random") != "random":
        return found
    fine = {"chunks": column_rows(spec.shape, spec.dtype.itemsize), "shards": True}
    return {"compressors": "none"} | ({} if {"chunks", "shards"} & {*found, *spec.options} else fine) | found


def sharding(inner: tuple[int, ...], codecs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the metadata of the sharding codec."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": list(inner),
            "codecs": codecs,
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        },
    }


def check_names(options: Mapping[str, Any], url: str, path: Path | None = None) -> None:
    """Refuse options that this backend does not have; the error has the most similar name."""
    for name in options:
        if name not in OPTIONS:
            raise refusals.leaf_option(url, path, name, OPTIONS)
    if options.get("layout") is not None:
        check_layout(options["layout"], "new leaves" if path is None else path_text(path), url)


def _inner(value: Any, shape: tuple[int, ...], itemsize: int, layout: str, url: str, where: str) -> tuple[int, ...]:
    if value is None or value is True:
        return preset_chunks(layout, shape, itemsize, most=shape[0] if shape else None, widest=WIDEST)
    leading = leading_sizes(value, "chunks", where, url)[: len(shape)]
    return tuple(max(1, min(n, c)) for n, c in zip(shape, (*leading, *shape[len(leading) :]), strict=True))


def _shard(
    value: Any, chunked: bool, inner: tuple[int, ...], shape: tuple[int, ...], itemsize: int, url: str, where: str
) -> tuple[int, ...]:
    if not shape or value is False or (value is None and chunked):
        return inner
    if value is not None and value is not True:
        leading = leading_sizes(value, "shards", where, url)[: len(shape)]
        whole = (*leading, *shape[len(leading) :])
        return tuple(-(-max(1, min(n, s)) // i) * i for n, s, i in zip(shape, whole, inner, strict=True))
    nbytes = math.prod(shape) * itemsize
    target = min(MOST_SHARD, max(LEAST_SHARD, nbytes // SHARDS))
    shard = list(inner)
    for dim in reversed(range(len(shape))):
        there = -(-shape[dim] // inner[dim])
        fits = max(1, target // max(1, math.prod(shard) * itemsize))
        shard[dim] = inner[dim] * max(1, min(there, fits, MAX_INNER // 64))
        if fits < there:
            break
    return tuple(shard)


def _codecs(value: Any, data_type: str, checksum: bool, url: str, where: str) -> list[dict[str, Any]]:
    itemsize = np.dtype(data_type).itemsize
    end = [{"name": "crc32c"}] if checksum else []
    start = [{"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"}]
    if value is None or value is True or value == "auto":
        value = "lz4"
    if value is False or value == "none" or value == ():
        return [*start, *end]
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    found = [_codec(item, itemsize, url, where) for item in items]
    if any(codec["name"] in ("bytes", "sharding_indexed") for codec in found):
        raise wrong_value("compressors", value, "codecs that compress bytes: chunks= and shards= are apart", where, url)
    codecs = [*start, *found, *(end if found[-1:] != end else [])]
    try:
        parse_pipeline(codecs)
    except ChunkError as error:
        raise OptionError(f"{url}: compressors of {where}: {error}", url=url) from None
    return codecs


def _codec(item: Any, itemsize: int, url: str, where: str) -> dict[str, Any]:
    names = {"lz4": "lz4", "blosc": "lz4", "lz4hc": "lz4hc", "blosc-zstd": "zstd"}
    if isinstance(item, str) and item in names:
        shuffle = "shuffle" if itemsize > 1 else "noshuffle"
        settings = {"typesize": itemsize, "cname": names[item], "clevel": 5, "shuffle": shuffle, "blocksize": 0}
        return {"name": "blosc", "configuration": settings}
    if item == "zstd":
        return {"name": "zstd", "configuration": {"level": 0, "checksum": False}}
    if item == "gzip":
        return {"name": "gzip", "configuration": {"level": 5}}
    to_dict = getattr(item, "to_dict", None)  # zarr-python's codecs
    if callable(to_dict):
        item = to_dict()
    if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
        kinds = "'lz4', 'lz4hc', 'blosc-zstd', 'zstd', 'gzip', 'none', a zarr codec, its metadata, or a list of these"
        raise wrong_value("compressors", item, kinds, where, url)
    if item["name"] not in SAFE_CODECS:
        raise OptionError(
            f"{url}: compressors of {where}: the codec {item['name']!r} is not one that can be read back", url=url
        )
    settings = dict(item.get("configuration") or {})
    if item["name"] == "blosc":
        settings = {key: getattr(v, "value", v) for key, v in settings.items()}
        settings["typesize"] = settings.get("typesize") or itemsize
        if settings.get("shuffle") in (None, "auto"):
            settings["shuffle"] = "shuffle" if itemsize > 1 else "noshuffle"
    return {"name": item["name"], "configuration": settings} if settings else {"name": item["name"]}
