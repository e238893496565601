"""Broadcasting of batch sizes in arithmetic and comparisons."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.core.dim_names import extend_names
from tdstore.container.values.nontensor import NonTensor
from tdstore.errors import BatchSizeError, NotAGroupError
from tdstore.index.shapes import common_prefix

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict

T = TypeVar("T", Tensor, Container)
Operand = TypeVar("Operand")


def uneven(td: Container, operands: Sequence[Any]) -> bool:
    """Check whether the result may have a larger batch size than `td`: call `widened` then.

    An operand is a TensorDict of another batch size, or a tensor with more dimensions or where `td` has a length of 1.
    """
    batch = td.batch_size
    for operand in operands:
        kind = type(operand)
        if kind is int or kind is float:
            continue
        if isinstance(operand, Container):
            if operand.batch_size != batch:
                return True
        elif isinstance(operand, Tensor) and (operand.ndim > len(batch) or (operand.ndim and 1 in batch)):
            return True
    return False


def widened(td: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]] | None:
    """Expand a TensorDict and its operands to the batch size of the result; tensors stay as they are.

    Returns None where that is the batch size of `td`, or where there is none: then the leaves say what does not fit.
    """
    try:
        wide = torch.broadcast_shapes(td.batch_size, *[o.shape for o in operands if isinstance(o, (Container, Tensor))])
    except RuntimeError:
        return None
    if wide == td.batch_size:
        return None
    return td.expand(wide), [o.expand(wide) if isinstance(o, Container) else o for o in operands]


def tensor_operands(other: Tensor, batch: torch.Size, ndims: Iterable[int]) -> list[Tensor]:
    """Expand a tensor for each leaf, so that it broadcasts to a batch size with that leaf's number of dimensions.

    Raises:
        BatchSizeError: the tensor has a larger shape than the batch.
    """
    try:
        fits = torch.broadcast_shapes(other.shape, batch) == batch
    except RuntimeError:
        fits = False
    if not fits:
        raise BatchSizeError(
            f"a tensor of shape {list(other.shape)} cannot be broadcast to batch size {list(batch)}",
            hint="tensors are aligned with the batch dimensions; td.apply(fn) combines them with the others",
        )
    wide, n = other.expand(batch), len(batch)
    return [wide.reshape(*batch, *(1,) * (ndim - n)) for ndim in ndims]


def below(operand: Operand, batch: torch.Size, nested: Container) -> Operand:
    """Return a tensor or number beside a TensorDict as the operand of a nested one, whose batch size may be longer."""
    if not isinstance(operand, Tensor) or not operand.ndim or nested.batch_dims == len(batch):
        return operand
    made: Any = tensor_operands(operand, batch, (nested.batch_dims,))[0]
    return made  # type: ignore[no-any-return]  # a tensor, as the operand


def check_leaves(results: Sequence[Tensor], batch_size: torch.Size) -> None:
    """Refuse results that do not start with the batch size of their TensorDict.

    Raises:
        BatchSizeError: a leaf of an operand is larger than its place in the result.
    """
    for leaf in results:
        if leaf.shape[: len(batch_size)] != batch_size:
            raise BatchSizeError(
                f"a result of shape {list(leaf.shape)} does not start with the batch size {list(batch_size)}",
                hint="give both TensorDicts the batch size of the result",
            )


def expanded_as(td: Any, other: Any, lead: int) -> TensorDict:
    """Expand each leaf of a TensorDict of live tensors to the shape of the leaf that `other` has under its key.

    Values take the batch size alone, and need not be in `other`. Nested TensorDicts keep their number of batch
    dimensions beside the `lead` new ones, or have that of `other` if it is larger.

    Raises:
        KeyNotFoundError: `other` lacks an entry. BatchSizeError: a shape that cannot be expanded so.
    """
    old, new = td._batch_size, other.batch_size
    names = td._names
    data: dict[str, Any] = {}
    for key, value in td._data.items():
        kind = other._kind(key)
        if isinstance(value, NonTensor):
            data[key] = value.move(functools.partial(_expand_batch, key, len(old), new))
        elif kind is None:
            raise other._missing(key)
        elif kind != (GROUP if isinstance(value, Container) else LEAF):
            raise NotAGroupError(f"one of the two entries {key!r} is a TensorDict, the other is not")
        elif kind == LEAF:
            data[key] = _expand(key, value, other._leaf_shape(key))
        else:
            data[key] = value._expanded_as(other._raw(key), lead)
    if lead + len(old) > len(new) and data:
        shapes = [v.batch_size if isinstance(v, (Container, NonTensor)) else v.shape for v in data.values()]
        new = common_prefix([new + shape[len(new) :] for shape in shapes])[: lead + len(old)]
    names = None if names is None or lead < 0 else extend_names((None,) * lead + names, len(new))
    made: TensorDict = td._new(data, new, td._device, names)
    return made


def _expand_batch(key: str, ndim: int, batch: torch.Size, leaf: Tensor) -> Tensor:
    return _expand(key, leaf, (*batch, *leaf.shape[ndim:]))


def _expand(key: str, leaf: Tensor, shape: Sequence[int]) -> Tensor:
    try:
        return leaf.expand(tuple(shape))
    except RuntimeError as error:
        raise BatchSizeError(f"the entry {key!r} of shape {list(leaf.shape)} cannot be expanded: {error}") from None


def expand_right(tensor: T, shape: Sequence[int]) -> T:
    """Expand a tensor or a TensorDict to a shape that begins with its own.

    Args:
        tensor: of shape `[*s]`.
        shape: `[*s, *more]`, where a dimension of one in `s` may be longer.

    Returns:
        A view of shape `shape`: values repeat along the new dimensions at the right.

    Raises:
        RuntimeError: `shape` does not begin with the shape of `tensor`.

    Example:
        >>> expand_right(torch.arange(2), (2, 3)).tolist()
        [[0, 0, 0], [1, 1, 1]]
    """
    own = tensor.shape
    if len(shape) < len(own):
        raise BatchSizeError(f"a shape of {list(own)} cannot be expanded to the shorter {list(shape)}")
    wide: T = tensor.reshape(own + (1,) * (len(shape) - len(own))).expand(tuple(shape))
    return wide


def expand_as_right(tensor: T, dest: Tensor | Container) -> T:
    """Expand a tensor or a TensorDict to the shape of another, which begins with its own.

    Args:
        tensor: of shape `[*s]`.
        dest: of shape `[*s, *more]`; of a TensorDict, its batch size counts.

    Raises:
        RuntimeError: `dest` does not begin with the shape of `tensor`.

    Example:
        >>> expand_as_right(torch.arange(2), torch.zeros(2, 3)).tolist()
        [[0, 0, 0], [1, 1, 1]]
    """
    return expand_right(tensor, dest.shape)
