"""From and to numpy: nested dicts of arrays, and structured arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.entries.structured_arrays import fields_of
from tdstore.container.functions.construct_and_join import from_dict
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.convert.tables.row_blocks import refuse_ragged, row_blocks
from tdstore.dtypes import is_bit_pattern, numpy_dtype
from tdstore.errors import InvalidTypeError, OptionError
from tdstore.types import DeviceLike, SizeLike, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict


def to_numpy(td: Container) -> dict[str, Any]:
    """Convert to nested dicts of values and of arrays over the memory of the leaves; values per row become arrays."""
    out: dict[str, Any] = {}
    for key, value in td._resident().items():
        if isinstance(value, NonTensorStack):
            out[key] = value_array(value)
        elif isinstance(value, NonTensor) and not isinstance(value, Tensor):
            out[key] = value.plain()
        else:
            out[key] = value.numpy() if isinstance(value, Container) else tensor_array(value, (key,))  # type: ignore[attr-defined]
    return out


def tensor_array(tensor: Tensor, path: tuple[str, ...]) -> np.ndarray[Any, Any]:
    """View a tensor as an array. The error for a dtype that numpy lacks names the entry."""
    try:
        return tensor.numpy(force=tensor.device.type != "cpu" and not tensor.requires_grad)
    except (TypeError, RuntimeError) as error:
        raise type(error)(f"entry {path_text(path)}: {error}") from None


def value_array(values: NonTensor) -> np.ndarray[Any, Any]:
    """Convert values per row to an array of the batch's shape: of text, numbers, or objects if the types differ."""
    flat = values.flat()
    kinds = {type(v) for v in flat}
    if kinds and kinds <= {str, bytes, bool, int, float, complex} and len(kinds) == 1:
        return np.array(flat).reshape(values.batch_size)
    array = np.empty(len(flat), object)
    array[:] = flat
    return array.reshape(values.batch_size)


# -- structured arrays -------------------------------------------------------------------------

_SMALL = 1 << 20
"""Up to this many bytes a lazy stack is not read in blocks."""


def from_struct_array(
    struct_array: np.ndarray[Any, Any],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
) -> TensorDict:
    """Make a TensorDict from the fields of a structured array; the batch size is the array's shape.

    Numbers share the array's memory where torch can; a field whose distance from row to row is not a multiple of its
    item size, or one of a read-only array, is copied. Text, bytes and dates become one value per row, fields of
    fields nested TensorDicts.

    Args:
        struct_array: the structured array.
        auto_batch_size: whether each level gets the largest batch size that its entries share.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: that of the input.
        batch_size: the batch size; default: the shape of the array.

    Raises:
        InvalidTypeError: `struct_array` is not a structured array. InvalidArgumentError: both `batch_size` and
            `auto_batch_size`.

    Example:
        >>> dogs = np.array([("Rex", 9), ("Fido", 3)], dtype=[("name", "U10"), ("age", "i4")])
        >>> td = from_struct_array(dogs)
        >>> td["age"] += 1
        >>> dogs["age"].tolist(), td["name"]
        ([10, 4], LinkedList(['Rex', 'Fido']))
    """
    array = np.asarray(struct_array)
    if array.dtype.names is None:
        raise InvalidTypeError(f"expected a structured array, not one of dtype {array.dtype}")
    auto = batch_size is None and auto_batch_size
    if batch_size is not None and auto_batch_size:
        raise OptionError("give batch_size or auto_batch_size=True, not both")
    shape = array.shape if batch_size is None and not auto else batch_size
    cls, dims = Container._resident_class, batch_dims if auto else None
    return from_dict(cls, fields_of(array, cls), shape, auto, dims, device, None)


def to_struct_array(td: Container) -> np.ndarray[Any, Any]:
    """Build a structured array of the batch's shape, with a field per entry."""
    in_memory = td._plain_leaves() is not None
    if not in_memory:
        refuse_ragged(td, "to_struct_array")
        leaves = td._memory_leaves()  # of a lazy stack: if they are few, it is made at once
        in_memory = leaves is not None and sum([leaf.nbytes for leaf in leaves]) <= _SMALL
    source = td._resident() if in_memory else td
    out = np.empty(td.batch_size, _struct_dtype(source, td.batch_dims))
    if in_memory or not td.batch_dims:
        _fill(out, source._resident())
        return out
    for start, stop, block in row_blocks(td):
        _fill(out[start:stop], block)
    return out


def _struct_dtype(td: Any, n: int) -> np.dtype[Any]:
    """Return the dtype of a row, of `n` batch dimensions. Reads no tensors."""
    fields: list[Any] = []
    dense = td._plain_specs()
    for key in td._first_keys():
        kind = td._kind(key)
        if kind == GROUP:
            fields.append((key, _struct_dtype(td._raw(key), n)))
        elif kind == LEAF:
            spec = dense.get(key) or td._leaf_facts(key)
            shape, dtype = spec.shape, spec.dtype
            fields.append((key, _number_dtype(dtype, key), tuple(shape[n:])))
        else:
            values = td._raw(key)
            fields.append((key, _value_dtype(values), tuple(values.batch_size[n:])))
    return np.dtype(fields)


def _number_dtype(dtype: torch.dtype, key: str) -> np.dtype[Any]:
    if is_bit_pattern(dtype):
        raise InvalidTypeError(f"entry {key!r}: numpy has no {dtype}; cast it first, such as with td.float()")
    return numpy_dtype(dtype)


def _value_dtype(values: NonTensor) -> Any:
    known = getattr(getattr(values, "_pool", None), "dtype", None)
    if isinstance(known, np.dtype):
        return known
    flat = [values.data] if isinstance(values, NonTensorData) else values.flat()
    kinds = {type(v) for v in flat}
    if kinds == {str}:
        return f"U{max(_TEXT_WIDTH, *map(len, flat))}"
    return np.asarray(flat).dtype if len(kinds) == 1 and kinds <= {bytes, bool, int, float, complex} else object


_TEXT_WIDTH = 10
"""The smallest width of text of unknown width, in characters."""


def _fill(out: Any, block: Any) -> None:
    for key, value in block.items():
        if isinstance(value, Container):
            _fill(out[key], value._resident())
        elif isinstance(value, Tensor):
            out[key] = value.numpy(force=True)
        elif isinstance(value, NonTensorData):
            out[key] = value.data
        else:
            array = np.empty(value.numel(), object)
            array[:] = value.flat()
            out[key] = array.reshape(value.batch_size)
