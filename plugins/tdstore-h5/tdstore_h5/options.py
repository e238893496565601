"""Layout options of leaves: `layout`, and those of h5py's `create_dataset`, checked by name and fitted to each leaf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tdstore.storekit import chunks as presets
from tdstore.storekit import refusals
from tdstore.storekit.foreign_strings import TEXT
from tdstore.types import LeafSpec, Path, path_text
from tdstore_h5.faults import option_error

# Any of these requires chunked storage.
CHUNKED = ("chunks", "maxshape", "compression", "shuffle", "fletcher32", "scaleoffset")
LAYOUT = (
    "layout",
    *CHUNKED,
    "compression_opts",
    "track_times",
    "track_order",
    "fillvalue",
    "fill_time",
    "allow_unknown_filter",
    "rdcc_nslots",
    "rdcc_nbytes",
    "rdcc_w0",
)
_LARGEST = 64 << 20
"""Bytes of a chunk (HDF5 caches one MiB of decoded chunks)."""
_OUTSIDE = ("external", "efile_prefix", "virtual_prefix")


def check_names(options: Mapping[str, Any], url: str, path: Path | None = None) -> None:
    """Refuse options that h5py does not have.

    Raises:
        OptionError: the message has the most similar name.
    """
    for name in options:
        if name in _OUTSIDE:
            raise option_error(url, f"the option {name!r} would keep data outside the file; it is not supported")
        if name not in LAYOUT:
            raise refusals.leaf_option(url, path, name, LAYOUT)


def fit(spec: LeafSpec, defaults: Mapping[str, Any], url: str, path: Path, *, column: bool = False) -> dict[str, Any]:
    """Return the options of one leaf, cut to its shape. Its own options take precedence over those of the file.

    `chunks` and `maxshape` may name the leading dimensions only (`chunks=64`: 64 rows), are cut to
    the leaf's number of dimensions, and chunks to its size. A scalar has no layout to choose.

    Args:
        spec: the spec of the leaf.
        defaults: the options of the file.
        url: the location, for messages.
        path: the leaf.
        column: whether it is one of the two leaves of a var-length column.

    Raises:
        OptionError: an unknown option, or a value of the wrong kind.
    """
    check_names(spec.options, url, path)
    if column:
        defaults = _column_options(path[-1], spec, defaults)
    if "layout" in spec.options and "chunks" not in spec.options:
        defaults = {**defaults, "chunks": None}  # the option of the leaf takes precedence over that of the file
    merged = {k: v for k, v in {**defaults, **spec.options}.items() if v is not None and v is not False}
    preset = merged.pop("layout", None)
    if preset is not None:
        presets.check_layout(preset, path_text(path), url)
    merged.pop("fillvalue", None)  # h5py's name for LeafSpec.fill_value, see `with_fill`
    if not spec.shape:
        return {k: v for k, v in merged.items() if k == "track_times"}
    if "maxshape" in merged:
        merged["maxshape"] = _fit_maxshape(merged["maxshape"], spec.shape, url, path)
    if preset is not None and merged.get("chunks", True) is True and not merged.keys().isdisjoint(CHUNKED):
        merged["chunks"] = preset_chunks(preset, spec, merged.get("maxshape", spec.shape)[0])
    if "chunks" in merged and merged["chunks"] is not True:
        limit = merged.get("maxshape", spec.shape)
        merged["chunks"] = _fit_chunks(merged["chunks"], spec.shape, limit, url, path)
    if not merged:
        return merged
    if 0 in merged.get("maxshape", spec.shape) or merged.keys().isdisjoint(CHUNKED):
        # (HDF5 has no chunks for a dimension that stays empty.)
        return {k: v for k, v in merged.items() if k == "track_times"}
    return merged


def _column_options(name: str, spec: LeafSpec, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return small chunks, if any: nearly every random row is in a chunk of its own.

    Options for rows do not suit a data leaf, whose "rows" are bytes.
    """
    found = dict(requested)
    if name == TEXT:
        rows = [key for key in ("chunks", "maxshape") if found.get(key) not in (None, False)]
        found |= dict.fromkeys(rows, True)
    chosen = spec.options.get("chunks", found.get("chunks"))
    chunked = any(found.get(key) not in (None, False) for key in CHUNKED)
    if chunked and chosen in (None, True) and found.get("layout") != "scan":
        found["chunks"] = _column_chunks(spec)
    return found


def _column_chunks(spec: LeafSpec) -> tuple[int, ...]:
    return (presets.column_rows(spec.shape, spec.dtype.itemsize), *(max(1, n) for n in spec.shape[1:]))


def growing_chunks(spec: LeafSpec, *, column: bool) -> tuple[int, ...]:
    """Return chunks for a leaf that had none and begins to grow."""
    return _column_chunks(spec) if column else preset_chunks("random", spec, None)


def preset_chunks(preset: str, spec: LeafSpec, most: int | None) -> tuple[int, ...]:
    """Return chunks of whole rows along the first dimension: for single rows ("random") or long runs of rows ("scan").

    Args:
        preset: "random" or "scan".
        spec: the spec of the leaf.
        most: rows that the leaf can have; None: any number.

    Example:
        >>> preset_chunks("random", LeafSpec((1000, 84, 84), "uint8"), 1000)
        (1, 84, 84)
    """
    return presets.preset_chunks(preset, spec.shape, spec.dtype.itemsize, most=most, widest=_LARGEST)


def with_fill(spec: LeafSpec, defaults: Mapping[str, Any]) -> LeafSpec:
    """Return the spec with the fill value of h5py's option `fillvalue`."""
    value = spec.options.get("fillvalue", defaults.get("fillvalue"))
    return spec if value is None or spec.fill_value else spec.replace(fill_value=value)


def _fit_maxshape(value: Any, shape: tuple[int, ...], url: str, path: Path) -> tuple[int | None, ...]:
    if value is True:
        return (None,) * len(shape)
    leading = _tuple(value, "maxshape", url, path, allow_none=True)[: len(shape)]
    limit = (*leading, *shape[len(leading) :])
    for most, now in zip(limit, shape, strict=True):
        if most is not None and most < now:
            raise option_error(url, f"maxshape {limit} of {path_text(path)} is smaller than its shape {shape}")
    return limit


def _fit_chunks(
    value: Any, shape: tuple[int, ...], limit: tuple[int | None, ...], url: str, path: Path
) -> tuple[int, ...]:
    leading = _tuple(value, "chunks", url, path, allow_none=False)[: len(shape)]
    chunks = (*leading, *(max(1, n) for n in shape[len(leading) :]))
    # A dimension that can grow may have chunks longer than it is now.
    return tuple(n if most is None else max(1, min(n, most)) for n, most in zip(chunks, limit, strict=True))


def _tuple(value: Any, name: str, url: str, path: Path, *, allow_none: bool) -> tuple[Any, ...]:
    items: Any = (value,) if isinstance(value, int) or value is None else value
    try:
        result = tuple(None if n is None and allow_none else int(n) for n in items)
    except (TypeError, ValueError):
        raise option_error(url, f"{name} of {path_text(path)} must be integers, not {value!r}") from None
    if any(n is not None and n < (1 if name == "chunks" else 0) for n in result):
        raise option_error(url, f"{name} of {path_text(path)} must be positive, not {value!r}")
    return result
