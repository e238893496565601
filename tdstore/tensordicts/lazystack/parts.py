"""What of a value goes to one element of a lazy stack, or to some positions of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from tdstore.arguments import tensor_for
from tdstore.container.core.container import LEAF, VALUE, Container
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.container.values.shapes import constant
from tdstore.errors import BatchSizeError, UnevenError
from tdstore.index.selection import index_shape
from tdstore.index.tracing import traced
from tdstore.ops.block_reductions import Reduction, State
from tdstore.tensordicts.lazystack.routing import Route, pick
from tdstore.types import Path, path_text


def result_ndim(inner: torch.Size, found: Route) -> int:
    """Return the number of dimensions of the result of a route, for elements of that shape."""
    sizes = torch.Size(2 if n < 0 else n for n in inner) if -1 in inner else inner
    ndim = len(index_shape(sizes, found.rest)) - found.lift
    return ndim + (0 if isinstance(found.rows, int) else found.rows.ndim)


def lifted(part: Tensor, found: Route, ndim: int) -> Tensor:
    """Return the part with the dimension of size 1 that `rest` asks for."""
    if not found.lift or part.ndim <= ndim - found.place - 1 or not part.ndim:
        return part
    after = ndim - found.place
    return part.unsqueeze(part.ndim - after) if part.ndim >= after else part


def part_at(td: Any, key: str, value: Any, found: Route, number: int, wide: int) -> Any:
    """Return the part of a value for one element at a batch index whose result has `wide` batch dimensions."""
    block = () if isinstance(found.rows, int) else tuple(found.rows.shape)
    kind = td._kind(key)
    if isinstance(value, NonTensor):
        if kind != VALUE or isinstance(value, NonTensorData) or not block or value.ndim < wide:
            return value
        at = tuple(int(i) for i in np.unravel_index(number, block))
        return value[(*(slice(None),) * found.place, *at)]
    if kind != LEAF or isinstance(value, (bool, int, float, complex)):
        return value
    tensor = tensor_for(value, f"entry {key!r}")
    features = len(td._leaf_shape(key)) - len(td._batch_size)
    try:
        part = pick(tensor, found.place, block, number, wide + features)
    except IndexError:
        raise BatchSizeError(f"cannot write shape {list(tensor.shape)} into entry {key!r} at this index") from None
    return lifted(part, found, wide + features - len(block))


def flat_part(td: Any, key: str, value: Any, shape: torch.Size, mine: Tensor, several: bool) -> Any:
    """Return the part of a value for the flat positions `mine` of a result of `shape`."""
    if isinstance(value, NonTensor):
        if isinstance(value, NonTensorData):
            return value
        flat = value.move(lambda t: t.expand(shape).reshape(-1))
        return flat[mine] if several else flat[int(mine[-1])]
    if td._kind(key) != LEAF or isinstance(value, (bool, int, float, complex)):
        return value
    feature = td._leaf_shape(key)[len(td._batch_size) :]
    tensor = tensor_for(value, f"entry {key!r}")
    try:
        rows = tensor.expand(*shape, *feature).reshape(-1, *feature)
    except RuntimeError:
        raise BatchSizeError(
            f"cannot write shape {list(tensor.shape)} into entry {key!r} at an index of shape {list(shape)}"
        ) from None
    return rows[mine] if several else rows[mine[-1]]


def pieces(node: Any, path: Path) -> Iterator[Tensor]:
    """Yield the tensors that an entry consists of: one for each element of the lazy stacks on the path."""
    if isinstance(node, Container._stack_class):
        for td in node._tds:
            yield from pieces(td, path)
    elif len(path) > 1:
        yield from pieces(node._raw(path[0]), path[1:])
    else:
        yield node._raw(path[0])


def merge_states(kind: Reduction, path: Path, one: State, other: State) -> State:
    """Merge the states of a reduction over two parts of an entry.

    Raises:
        UnevenError: the parts have different shapes.
    """
    assert kind.merge is not None
    if any(a.shape != b.shape for a, b in zip(one, other, strict=True) if a.ndim and b.ndim):
        raise UnevenError(
            f"the entries {path_text(path)} of this lazy stack have different shapes, and are reduced over the stack",
            hint="reduce everything (dim=None), another dimension, or td.get(key, as_padded_tensor=True)",
        )
    return kind.merge(one, other)


def reduced_size(batch: torch.Size, dims: tuple[int, ...], keepdim: bool) -> torch.Size:
    """Return the batch size that a reduction over some dimensions leaves."""
    if keepdim:
        return torch.Size(1 if i in dims else n for i, n in enumerate(batch))
    return torch.Size(n for i, n in enumerate(batch) if i not in dims)


def row_parts(value: Any, found: Route, single: bool) -> list[tuple[int, Any]]:
    """Return the elements that a route leads to, each with its part of the value; `single` gives all the whole."""
    if single or isinstance(found.rows, int):
        return [(row, value) for row in ([found.rows] if isinstance(found.rows, int) else found.rows.tolist())]
    grid = found.rows
    places = [torch.unravel_index(torch.tensor(i, device="cpu"), grid.shape) for i in range(grid.numel())]
    lead = (slice(None),) * found.place
    return [(row, value._at((*lead, *map(int, at)))) for row, at in zip(grid.flatten().tolist(), places, strict=True)]


def own_copies(targets: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """Copy the parts that an earlier target shares memory with, and so would be changed before they are read."""
    written: set[object] = set()
    found = []
    for target, part in zip(targets, parts, strict=True):
        found.append(part.clone() if written and isinstance(part, Container) and written & places(part) else part)
        written |= places(target)
    return found


def may_share(targets: Sequence[Any], source: Any, parts: Sequence[Any]) -> bool:
    """Return whether parts of a source may lie in the memory of other targets, as far as the first of each tell."""
    if parts is targets or is_compiling():
        return False
    if isinstance(source, Container._stack_class):
        if not {*map(id, targets)}.isdisjoint(map(id, parts)):
            return True
        source = parts[0] if parts else source
    for td in map(unwrap, (source, *targets[:1])):
        if isinstance(td, Container._stored_class) or any(leaf._is_view() for leaf in td._leaf_list()):
            return True
    return False


def unshared(targets: Sequence[Tensor], source: Tensor) -> Tensor:
    """Return a tensor, or a copy where targets are in its memory: one may be written before the next part is read."""
    if traced():
        return source
    memory = source.untyped_storage()
    start = memory.data_ptr()
    end = start + memory.nbytes()
    for pointer in map(Tensor.data_ptr, targets):
        if start <= pointer < end:
            return source.clone()
    return source


def places(td: Any) -> set[object]:
    """Return what says where the leaves of a container are: their storages, or the store that it is over."""
    found: set[object] = set()
    td = unwrap(td)
    if isinstance(td, Container._stack_class):
        return found.union(*(places(element) for element in td._tds))
    if isinstance(td, Container._stored_class):
        return {id(td._handle)}
    if is_compiling():
        return {id(td)}  # a graph has no storages
    for value in td._data.values():
        if isinstance(value, Container):
            found |= places(value)
        elif is_batched(value):
            found.add(value.untyped_storage()._cdata)
        else:
            found.add(id(value))
    return found


def without_rows(tds: Sequence[Any], first: Any, place: int, shape: Sequence[int], name: str | None) -> Container:
    """Return what an index gives that selects no element: no rows of the entries that all have, as the first has them.

    Args:
        tds: the elements.
        first: the part of the first element that the index takes.
        place: where the dimensions of the index are in the result.
        shape: their lengths.
        name: of the dimension of the stack.
    """
    lacking = [key for key in first._first_keys() if any(td._kind(key) is None for td in tds[1:])]
    first = first.exclude(*lacking) if lacking else first
    none: Container = first.unsqueeze(place)._at((*(slice(None),) * place, slice(0, 0)))
    if name is not None:
        none.names = [name if dim == place else old for dim, old in enumerate(none.names)]
    batch = none.batch_size
    return none if len(shape) == 1 else none.reshape(*batch[:place], *shape, *batch[place + 1 :])


def copy_of_selected(td: Container) -> Container:
    """Copy an element that a mask selects, as torch does; one that is stored stays a window."""
    if isinstance(td, Container._stack_class):
        return td._each(copy_of_selected)
    return td if isinstance(unwrap(td), Container._stored_class) else td.clone()


def reshapes(td: Any, part: Any) -> bool:
    """Return whether a tensor of `part`, of the same batch size, has another shape than the one in `td`."""
    return td.batch_size == part.batch_size and any(
        isinstance(value, Tensor) and isinstance(old := td.get(key, None), Tensor) and old.shape != value.shape
        for key, value in part.items(True, True)
    )


def one_value(td: Any, key: str, part: Any) -> object:
    """Return one value for the stack of equal ones that is written over the one value of an element."""
    if not isinstance(part, NonTensorStack) or td._kind(key) != VALUE or not isinstance(td._raw(key), NonTensorData):
        return part
    single = constant(part, (0,) * part.ndim)
    return part if single is None else NonTensorData(single.tolist(), part.batch_size)


def write_values(changes: Any, td: Any, part: Any) -> object:
    """Write the single values of a part that replaces a whole element; return the part without them."""
    values = {
        key: part._raw(key)
        for key in part._first_keys()
        if part._kind(key) == VALUE and td._kind(key) == VALUE and isinstance(part._raw(key), NonTensorData)
    }
    singles = {key: v for key, v in values.items() if isinstance(td._raw(key), NonTensorData)}
    if not singles:
        return part
    changes.write(td, {key: td._coerce_existing(key, value) for key, value in singles.items()})
    return part.exclude(*singles)


def are_entries(values: Any) -> bool:
    """Return whether values are a list of unstackable tensors, or of TensorDicts: one for each element."""
    return all(isinstance(v, (Tensor, Container, Mapping, NonTensor)) for v in values)


def size_without(size: torch.Size, dim: int) -> torch.Size:
    """Return a size without one of its dimensions."""
    return torch.Size((*size[:dim], *size[dim + 1 :]))


def merged_size(sizes: Sequence[Sequence[int]]) -> torch.Size | None:
    """Merge several sizes into one, -1 where they differ. Return None where their lengths differ."""
    if sizes and not any(size != sizes[0] for size in sizes):
        return torch.Size(sizes[0])
    if len({len(size) for size in sizes}) > 1:
        return None
    return torch.Size(c[0] if len(set(c)) == 1 else -1 for c in zip(*sizes, strict=True))
