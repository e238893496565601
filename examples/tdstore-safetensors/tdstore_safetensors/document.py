"""What the format has no room for: nested keys, batch sizes, values. One JSON document in `__metadata__`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from tdstore.dtypes import dtype_name
from tdstore.errors import CorruptStoreError
from tdstore.header import Group, Header, decode_header, header_to_builtins
from tdstore.types import LeafSpec, Path

from tdstore_safetensors.format import CARRIED, DTYPES

KEY = "tdstore"
"""Our key in `__metadata__`."""


def names_of(paths: Iterable[Path]) -> dict[str, Path]:
    """Give each leaf a name in the file: `next.obs` to `("next", "obs")`, and never one name to two."""
    names: dict[str, Path] = {}
    for path in sorted(paths, key=len):  # a plain key keeps its name beside a nested one that reads the same
        name = ".".join(path)
        while name in names or name == "__metadata__":
            name += "'"
        names[name] = path
    return names


def write_document(header: Header, names: Mapping[str, Path], specs: Mapping[str, LeafSpec]) -> str:
    """Write the header, and which leaf of which dtype each name stands for."""
    leaves = {name: [path, dtype_name(specs[name].dtype)] for name, path in names.items()}
    return json.dumps({**header_to_builtins(header), "leaves": leaves}, ensure_ascii=False)


def read_document(
    text: str | None, tensors: Mapping[str, tuple[LeafSpec, int]], url: str
) -> tuple[Header, dict[Path, tuple[LeafSpec, int]]]:
    """Read the header and the leaves by path. A tensor that the document does not know keeps its name as its key."""
    if text is None:  # somebody else's file: the keys are its names, and it says nothing of a batch
        return Header({(): Group(batch_size=(), keys=tuple(tensors))}), {(name,): tensors[name] for name in tensors}
    header = decode_header(text.encode(), url=url)
    leaves: dict[Path, tuple[LeafSpec, int]] = {}
    try:
        known = json.loads(text)["leaves"]
        for name, (spec, start) in tensors.items():
            parts, dtype = known.get(name) or ([name], dtype_name(spec.dtype))
            if dtype != dtype_name(spec.dtype):
                if DTYPES[CARRIED[dtype]] != dtype_name(spec.dtype) or spec.shape[-1:] != (2,):
                    raise ValueError(f"{name!r} cannot be {dtype}")
                spec = LeafSpec(spec.shape[:-1], dtype)
            if not parts or not all(isinstance(part, str) for part in parts) or tuple(parts) in leaves:
                raise ValueError(f"{name!r} cannot have the key {parts}")
            leaves[tuple(parts)] = spec, start
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptStoreError(f"the document of {url} is damaged: {error}", url=url) from error
    return header, leaves
