"""Batches of lists of samples, for loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from tdstore.arguments import refuse_type
from tdstore.container.core.container import Container
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import rewrap, takes, unwrap_all
from tdstore.container.functions.construct_and_join import maybe_dense_stack
from tdstore.container.functions.padding import pad_and_stack
from tdstore.container.values.nontensor import NonTensor, merge
from tdstore.convert.objects.pytree import is_namedtuple
from tdstore.errors import (
    BatchSizeError,
    InvalidArgumentError,
    InvalidStateError,
    InvalidTypeError,
    KeyNotFoundError,
    UnknownFieldError,
)
from tdstore.types import NestedKey, Path, path_text

C = TypeVar("C", bound=Tensor | Container)
_Columns: TypeAlias = dict[Path, list[Tensor]]


@overload
def collate(
    batch: list[C],
    *,
    pad_keys: Mapping[NestedKey, float] | None = None,
    nested_keys: Sequence[NestedKey] | None = None,
    mask_key: NestedKey | None = None,
) -> C: ...
@overload
def collate(
    batch: object,
    *,
    pad_keys: Mapping[NestedKey, float] | None = None,
    nested_keys: Sequence[NestedKey] | None = None,
    mask_key: NestedKey | None = None,
) -> object: ...
def collate(
    batch: object,
    *,
    pad_keys: Mapping[NestedKey, float] | None = None,
    nested_keys: Sequence[NestedKey] | None = None,
    mask_key: NestedKey | None = None,
) -> object:
    """Make a batch of a list of samples: a `collate_fn` for a `DataLoader`.

    TensorDicts and tensorclasses are stacked, lazily where they differ in keys or shapes; tensors are stacked. Of
    tuples, lists and dicts each part is made a batch; all else is left to torch. `functools.partial` passes arguments.

    Args:
        batch: the samples, alike in type. What is no list, or an empty one, is the batch already, and is returned.
        pad_keys: entries of TensorDicts without batch dimensions that are padded along their first dimension, and the
            numbers to pad them with.
        nested_keys: entries that become nested tensors (layout `torch.jagged`). All others must be padded or alike.
        mask_key: the entry for a TensorDict with a bool tensor for each of `pad_keys`, which is False at padding.

    Raises:
        InvalidArgumentError: `mask_key` without `pad_keys`, or of an entry that a sample has; a key in both `pad_keys`
            and `nested_keys`; entries of different shapes beside those of
            `nested_keys`; parts that differ in length.
        KeyNotFoundError: a sample lacks one of the keys.
        InvalidTypeError: an entry to pad or to nest is no tensor; samples of different types.
        BatchSizeError: `pad_keys` for samples with batch dimensions.
        InvalidStateError: entries of `pad_keys` or `nested_keys` differ in more than their first dimension.

    Example:
        >>> samples = [TensorDict({"ids": torch.ones(n), "label": torch.tensor(n)}) for n in (2, 1)]
        >>> collate(samples, pad_keys={"ids": -1})["ids"]
        tensor([[ 1.,  1.],
                [ 1., -1.]])
    """
    options = _options(pad_keys, nested_keys, mask_key)
    return _batch(batch, options) if isinstance(batch, list) and batch else batch


class _Options(NamedTuple):
    pad: dict[Path, float]
    nest: list[Path]
    mask: Path | None


def _options(pad_keys: Any, nested_keys: Any, mask_key: Any) -> _Options:
    if not isinstance(pad_keys, (Mapping, type(None))):
        raise refuse_type("pad_keys", "a mapping of keys to numbers", pad_keys)
    if isinstance(nested_keys, str) or not isinstance(nested_keys, (Sequence, type(None))):
        raise refuse_type("nested_keys", "a sequence of keys", nested_keys)
    pad = {entry_path(key): value for key, value in (pad_keys or {}).items()}
    nest = [entry_path(key) for key in nested_keys or ()]
    for path, value in pad.items():
        if not isinstance(value, (int, float)):
            raise refuse_type(f"the number to pad {path_text(path)} with", "a number", value)
        if path in nest:
            raise InvalidArgumentError(f"the key {path_text(path)} is both in pad_keys and in nested_keys")
    if mask_key is None:
        return _Options(pad, nest, None)
    if not pad:
        raise InvalidArgumentError("mask_key needs pad_keys: there is no padding to mask")
    return _Options(pad, nest, entry_path(mask_key))


def _batch(samples: list[Any], options: _Options) -> Any:
    first = samples[0]
    if isinstance(first, Container):
        return _of_containers(samples, options)
    if isinstance(first, NonTensor):
        return merge(samples, torch.stack)
    if isinstance(first, Tensor):
        return torch.stack(samples)
    if isinstance(first, Mapping):
        for sample in samples:
            for key in first:
                if key not in sample:
                    raise KeyNotFoundError(f"collate: a sample lacks {key!r}, which the first has")
        return {key: _batch([sample[key] for sample in samples], options) for key in first}
    if isinstance(first, (tuple, list)):
        if any(len(sample) != len(first) for sample in samples):
            raise InvalidArgumentError(f"collate: the samples have {sorted({*map(len, samples)})} parts each")
        parts = [_batch(list(part), options) for part in zip(*samples, strict=True)]
        if isinstance(first, list):
            return parts
        kind: Any = type(first)
        return kind._make(parts) if is_namedtuple(first) else tuple(parts)
    try:
        return torch.utils.data.default_collate(samples)
    except TypeError as error:
        raise InvalidTypeError(f"torch makes no batch of samples of {type(first).__name__}: {error}") from error


def _of_containers(samples: list[Any], options: _Options) -> Any:
    for sample in samples:
        if not isinstance(sample, Container):
            raise InvalidTypeError(
                f"collate: the first sample is a TensorDict, and another one a {type(sample).__name__}"
            )
    if not options.pad and not options.nest:
        return maybe_dense_stack(samples, 0)
    tensorclass, tds = unwrap_all(samples)
    for td in tds:
        _check_sample(td, options)
    tds = [td._resident() for td in tds]
    columns: _Columns = {path: [td.get(path) for td in tds] for path in (*options.pad, *options.nest)}
    rest = [td.clone(False).exclude(*columns) for td in tds]
    made = maybe_dense_stack(rest, 0)
    if options.nest and isinstance(made, Container._stack_class):
        raise InvalidArgumentError(
            "collate: beside nested tensors all other entries must have one shape, and some differ",
            hint="name them in pad_keys or nested_keys",
        )
    masks = Container._resident_class(batch_size=[len(tds)], device=made.device)
    for path, value in options.pad.items():
        tensor, mask = pad_and_stack(columns[path], 0, value, path, 1)
        made.set(path, tensor)
        masks.set(path, mask)
    for path in options.nest:
        made.set(path, _nested(columns[path], path))
    if options.mask is not None:
        made.set(options.mask, masks)
    return rewrap(tensorclass, made)


def _check_sample(td: Any, options: _Options) -> None:
    """Raise an error if a sample lacks an entry to pad or to nest, or has the entry for the masks."""
    if options.pad and td.batch_dims:
        raise BatchSizeError(
            f"collate pads the first dimension of entries, which is one of the batch here, of {list(td.batch_size)}",
            hint="use pad_sequence, or pass samples without batch dimensions",
        )
    for path in (*options.pad, *options.nest):
        found = td.get(path, None)
        if found is None:
            raise KeyNotFoundError(f"collate: a sample lacks the entry {path_text(path)}")
        if not isinstance(found, Tensor):
            raise InvalidTypeError(f"collate: the entry {path_text(path)} is no tensor, but a {type(found).__name__}")
        if found.ndim <= td.batch_dims:
            raise InvalidArgumentError(f"collate: the entry {path_text(path)} has no dimension that could vary")
    mask = options.mask
    if mask is None:
        return
    if not takes(td, mask[0]):
        raise UnknownFieldError(f"collate: the class of the samples has no field {mask[0]!r} for the masks")
    if mask in td.keys(include_nested=True):
        raise InvalidArgumentError(f"collate: mask_key is {path_text(mask)}, and a sample has that entry")


def _nested(tensors: list[Tensor], path: Path) -> Tensor:
    try:
        nested: Tensor = torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    except RuntimeError as error:
        raise InvalidStateError(f"collate: no nested tensor can be made of {path_text(path)}: {error}") from error
    return nested
