"""A container as a store sees it: group records and leaf specs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tdstore.container.core.container import GROUP, LEAF
from tdstore.container.core.dim_names import names_below, names_or_none
from tdstore.container.core.tensorclasses import class_of, kind_of
from tdstore.container.storage.value_records import from_json
from tdstore.container.values.codecs import codec_value, to_plain
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.container.varlen.columns import specs_of, stored_leaves
from tdstore.errors import InvalidArgumentError, UnsupportedError, UntrustedDataError
from tdstore.header import Group
from tdstore.storekit.foreign_strings import Refusal
from tdstore.types import LeafSpec, Names, Path, path_text
from tdstore.values import decode_value

if TYPE_CHECKING:
    from tdstore.values import JSON

STACK_KIND = "LazyStackedTensorDict"
"""The `kind` of a lazy stack's group in the header; the groups below it are its elements."""

_PLAINEST = (str, int, float, bool, type(None))


def describe(
    td: Any,
    prefix: Path = (),
    jagged: dict[Path, Tensor] | None = None,
    payloads: dict[Path, Tensor] | None = None,
) -> tuple[dict[Path, Group], dict[Path, LeafSpec]]:
    """Describe a container by group records and leaf specs, by path under `prefix`. Reads no data.

    Args:
        jagged: for one document with all: takes the nested tensors, and no value is kept as leaves.
        payloads: takes the leaves that values become, by path. Without it the values keep them.

    Raises:
        UntrustedDataError: a value that is not plain data; the message names its key.
    """
    groups: dict[Path, Group] = {}
    specs: dict[Path, LeafSpec] = {}
    waiting = [(prefix, td, class_of(td))]
    while waiting:
        path, node, tensorclass = waiting.pop()
        if (record := node._own_record()) is not None:
            groups[path] = record
            waiting += _below(path, node, tensorclass)
            continue
        above = groups.get(path[:-1]) if len(path) > len(prefix) else None
        if above is not None and above.kind != STACK_KIND and len(node.batch_size) < len(above.batch_size or ()):
            node.batch_size = above.batch_size  # it was given a smaller one behind its parent's back
        values: dict[str, Any] = {}
        dense = node._plain_specs()
        keys = tuple(node._first_keys())
        nested = False
        for key in keys:
            if key in dense:
                specs[(*path, key)] = dense[key]
                continue
            kind = node._kind(key)
            nested = nested or kind == GROUP
            if kind == LEAF and jagged is not None and node._leaf_layout(key) is torch.jagged:
                jagged[(*path, key)] = node._raw(key)
            elif kind == LEAF and (found := node._nested_parts(key)) is not None:
                values[key], leaves = found
                specs.update({(*path, key, name): spec for name, spec in leaves.items()})
            elif kind == LEAF:
                specs[(*path, key)] = _spec((*path, key), node)
            elif kind != GROUP and jagged is not None:
                values[key] = value_json(node._raw(key), (*path, key))
            elif kind != GROUP:
                values[key], held = stored_value(node._raw(key), (*path, key), payloads)
                specs.update(held)
        groups[path] = _group(node, keys, values, tensorclass)
        if nested:
            waiting += _below(path, node, None)
    return groups, specs


def _spec(path: Path, node: Any) -> LeafSpec:
    shape, device, dtype, _, name = node._leaf_facts(path[-1])
    layout = node._leaf_layout(path[-1])
    fake = name == FakeTensor.__name__
    if fake or device.type == "meta" or layout != torch.strided:
        what = "has no data (it is on the meta device)" if device.type == "meta" else f"has the layout {layout}"
        what = "has no data (it is a FakeTensor)" if fake else what
        hint = "store dense tensors, or exclude the key"
        raise UnsupportedError(f"entry {path_text(path)} {what} and cannot be stored", hint=hint)
    try:
        return LeafSpec(shape, dtype)
    except TypeError as error:
        raise UnsupportedError(f"entry {path_text(path)}: {error}", hint="cast it, or exclude the key") from None


def _below(path: Path, node: Any, tensorclass: type | None) -> list[tuple[Path, Any, type | None]]:
    """Return the groups below one, the last first, with their tensorclasses; else that of the lazy stack above."""
    found = []
    for key, group in reversed(node._stored_groups()):
        found.append(((*path, key), group, class_of(group) or tensorclass))
    return found


def _group(node: Any, keys: tuple[str, ...], values: dict[str, Any], tensorclass: type | None) -> Group:
    """Build the record of one level.

    Raises:
        UnsupportedError: its batch size has -1, which no window of stored data could be taken of.
    """
    batch, device = node.batch_size, node.device
    if -1 in batch:
        ragged = list(batch)
        raise UnsupportedError(
            f"a TensorDict with the batch size {ragged}, which is ragged, cannot be stored",
            hint=f"set td.batch_size = {ragged[: ragged.index(-1)]} first; its entries stay ragged all the same",
        )
    return Group(
        kind=kind_of(tensorclass),
        batch_size=tuple(map(int, batch)),  # `torch.Size` keeps integers of numpy
        names=node._dim_names(),
        device=None if device is None else str(device),
        keys=keys,
        values=values,
    )


def value_json(value: NonTensor, path: Path) -> JSON:
    """Build the record of a value. If it is not plain data, the error names its key."""
    with naming(path):
        return value.to_json()


def check_value(value: NonTensor, path: Path) -> None:
    """Look whether a value can be stored, before anything of it is written.

    Raises:
        UntrustedDataError: it is not plain data.
    """
    if isinstance(value, Tensor):
        return
    with naming(path):
        for one in value.flat() if isinstance(value, NonTensorStack) else [value.plain()]:
            if type(one) not in _PLAINEST:
                to_plain(one)


def stored_value(
    value: NonTensor, path: Path, payloads: dict[Path, Tensor] | None = None
) -> tuple[Any, dict[Path, LeafSpec]]:
    """Build the record of a value, and the specs of the leaves that hold it, if it has values enough for leaves.

    Args:
        payloads: takes the leaves themselves. Without it they are kept with the value, to be read down its path.
    """
    with naming(path):
        if (found := stored_leaves(value)) is None:
            return value.to_json(), {}
    value_record, leaves = found
    if payloads is not None:
        payloads.update({(*path, name): leaf for name, leaf in leaves.items()})
    elif isinstance(value, NonTensorStack):
        value._held = leaves
    return value_record, specs_of(leaves, path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let the error about a value that is not plain data name its key."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UntrustedDataError(
            f"the value {path_text(path)} cannot be stored: {error}",
            hint="store plain data (numbers, strings, lists, dicts, bytes, dates, ...), exclude the key before saving, "
            "or declare how to store it: tdstore.register_codec(Codec(name=..., kind=..., encode=..., decode=...)), "
            "for an enum tdstore.register_enum(cls); save(..., trust=True) pickles it, for readers who trust you",
        ) from error


def decoded(value_record: Any, batch_size: torch.Size) -> NonTensor:
    """Decode the entry that `value_json` described.

    Raises:
        InvalidArgumentError: malformed. UntrustedDataError: no installed plugin brings its codec.
        UnsupportedError: its store could not read it.
    """
    if isinstance(value_record, Refusal):
        raise UnsupportedError(value_record["refused"], hint=value_record["hint"])
    if isinstance(value_record, dict) and "refused" in value_record:
        raise InvalidArgumentError("the header has a refusal in its place")
    if not isinstance(value_record, dict) or "codec" not in value_record:
        return from_json(value_record, batch_size)
    return NonTensorData(codec_value(str(value_record["codec"]), decode_value(value_record["data"])), batch_size)


def named_groups(groups: Mapping[Path, Group], root: Path, names: Names) -> dict[Path, Group]:
    """Build the records of groups after one group, and those below it, got dimension names.

    Args:
        root: the group whose dimensions `names` are. Further dimensions of groups below it keep their names.
    """
    out = dict(groups)
    names_of: dict[Path, Names] = {}
    for path in sorted((p for p in groups if p[: len(root)] == root), key=len):
        group = groups[path]
        above = names if path == root else names_of[path[:-1]]
        if group.kind != STACK_KIND:
            names_of[path] = names_below(above, group.names, len(group.batch_size or ()))
            out[path] = msgspec.structs.replace(group, names=names_or_none(names_of[path]))
            continue
        dim = group.extra["stack_dim"]
        if above is not None and dim >= len(above):
            names_of[path] = above
            continue
        extra = {name: value for name, value in group.extra.items() if name != "name"}
        if above is not None and above[dim] is not None:
            extra["name"] = above[dim]
        rest = () if above is None else above[:dim] + above[dim + 1 :]
        names_of[path] = rest or None
        out[path] = msgspec.structs.replace(group, extra=extra)
    return out
