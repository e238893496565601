"""The features of all leaves in one tensor, and the layout by which they are found in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdstore.arguments import check_int, refuse_type
from tdstore.container.core.container import Container
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import Typed, unwrap
from tdstore.container.entries.unbatched import is_batched
from tdstore.errors import (
    DeviceError,
    DifferentKeysError,
    DimensionError,
    InvalidArgumentError,
    InvalidTypeError,
    UnevenError,
)
from tdstore.index.shapes import as_size
from tdstore.types import NestedKey, Path, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase


@dataclass(frozen=True)
class PackLayout:
    """Where each leaf is in a tensor that `TensorDict.pack` made. Hashable, and equal to another by its values.

    Attributes:
        keys: the keys of the leaves, in the order of their columns.
        shapes: the feature shape of each leaf: its shape behind the batch dimensions.
        dim: the packed dimension; `pack` counts it from the end, so `unpack` accepts more batch dimensions.
        nested: `(key, batch shape behind that of the root, tensorclass or None)` of each nested TensorDict.
        device: the device of the packed TensorDict.
        cls: the tensorclass of the packed TensorDict, or None.
    """

    keys: tuple[NestedKey, ...]
    shapes: tuple[torch.Size, ...]
    dim: int = -1
    nested: tuple[tuple[NestedKey, torch.Size, type | None], ...] = ()
    device: torch.device | None = None
    cls: type | None = None

    def __post_init__(self) -> None:
        """Convert lists, and check that keys and shapes belong together.

        Raises:
            InvalidArgumentError: they do not.
        """
        object.__setattr__(self, "keys", tuple(self.keys))
        object.__setattr__(self, "shapes", tuple([as_size(shape) for shape in self.shapes]))
        object.__setattr__(self, "nested", tuple([(key, as_size(shape), cls) for key, shape, cls in self.nested]))
        if len(self.keys) != len(self.shapes):
            raise InvalidArgumentError(f"a layout has one shape for each key: {self.keys}, {self.shapes}")
        paths = sorted([entry_path(key) for key in self.keys])
        for path, other in pairwise(paths):  # a path is sorted just before those below it
            if other[: len(path)] == path:
                raise InvalidArgumentError(f"a layout has no leaf {path_text(other)} beside a leaf {path_text(path)}")

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first column of each leaf."""
        return tuple(accumulate([math.prod(shape) for shape in self.shapes[:-1]], initial=0)) if self.shapes else ()

    @property
    def numel(self) -> int:
        """The number of columns."""
        return sum([math.prod(shape) for shape in self.shapes])

    def unpack(self, flat: Tensor) -> TensorDictBase:
        """Make a TensorDict of a packed tensor. Its leaves are views of the tensor.

        Args:
            flat: a tensor with `numel` columns in dimension `dim`; its other dimensions are the batch.

        Returns:
            A `TensorDict`, or an object of the class that was packed.

        Raises:
            InvalidTypeError: `flat` is no tensor.
            DimensionError: it has no dimension `dim`.
            InvalidArgumentError: it has another number of columns.

        Example:
            >>> flat, layout = TensorDict({"p": torch.zeros(5), "n": {"v": torch.ones(5, 3)}}, [5]).pack()
            >>> layout.unpack(flat[None])["n", "v"].shape
            torch.Size([1, 5, 3])
        """
        if not isinstance(flat, Tensor):
            raise refuse_type("flat", "a tensor", flat)
        dim = _from_end(self.dim, flat.ndim, f"a tensor of {flat.ndim} dimensions")
        if flat.shape[dim] != self.numel:
            raise InvalidArgumentError(
                f"the layout has {self.numel} columns; the packed tensor has {flat.shape[dim]} in dimension {self.dim}"
            )
        flat = flat.movedim(dim, -1)
        batch = flat.shape[:-1]
        groups: dict[Path, tuple[torch.Size, type | None]] = {(): (batch, self.cls)}
        for key, shape, cls in self.nested:
            groups[entry_path(key)] = torch.Size([*batch, *shape]), cls
        data: dict[Path, dict[str, Any]] = {(): {}}
        columns = flat.split([math.prod(shape) for shape in self.shapes], -1) if self.shapes else ()
        for path, shape, column in zip(map(entry_path, self.keys), self.shapes, columns, strict=True):
            leaf = column.unflatten(-1, shape) if shape else column.squeeze(-1)
            _group(data, path[:-1])[path[-1]] = leaf
        for path in groups:
            _group(data, path)
        device = None if self.device is None else flat.device
        new: Any = Container._resident_class
        for path in sorted(data, key=len, reverse=True):
            size, kind = groups.get(path, (batch, None))
            td = new._new(data[path], size, device, None)
            made: TensorDictBase = td if kind is None else _as_class(kind, td)
            if path:
                data[path[:-1]][path[-1]] = made
        return made


def _as_class(kind: Any, td: Any) -> Any:
    return kind._from_tensordict(td)


def _group(data: dict[Path, dict[str, Any]], path: Path) -> dict[str, Any]:
    """Return the entries of the group at a path; new groups get their place among the entries of their parents."""
    if path not in data:
        _group(data, path[:-1])[path[-1]] = None
        data[path] = {}
    return data[path]


def pack(td: Any, dim: int, layout: PackLayout | None) -> tuple[Tensor, PackLayout]:
    """Pack a container; see `TensorDict.pack`."""
    check_int(dim, "dim")
    batch = td.batch_size
    place = _from_end(dim, len(batch) + 1, f"a packed TensorDict of {len(batch)} batch dimensions")
    _check_even(td)
    td = td._resident()
    leaves: dict[Path, Tensor] = {}
    nested: list[tuple[Path, torch.Size, type | None]] = []
    for path, entry in _entries(td, ()):
        if isinstance(entry, Container):
            nested.append((path, entry.batch_size[len(batch) :], type(entry) if isinstance(entry, Typed) else None))
        else:
            leaves[path] = _packable(path, entry)
    shapes = {path: leaf.shape[len(batch) :] for path, leaf in leaves.items()}
    order = sorted(leaves, key=_dotted) if layout is None else _order_of(layout, shapes, place, len(batch) + 1)
    _check_alike(leaves, order)
    made = PackLayout(
        tuple([_key(path) for path in order]),
        tuple([shapes[path] for path in order]),
        place,
        tuple([(_key(path), shape, cls) for path, shape, cls in sorted(nested, key=lambda group: _dotted(group[0]))]),
        td.device,
    )
    if not order:
        return torch.empty(*batch, 0, device=td.device).movedim(-1, place).contiguous(), made
    columns = [_as_columns(leaves[path], len(batch)) for path in order]
    return torch.cat(columns, -1).movedim(-1, place).contiguous(), made


def _as_columns(leaf: Tensor, ndim: int) -> Tensor:
    return leaf.flatten(ndim) if leaf.ndim > ndim else leaf.unsqueeze(-1)


def _order_of(layout: Any, shapes: dict[Path, torch.Size], place: int, ndim: int) -> list[Path]:
    """Return the paths of a layout that these leaves fit."""
    if not isinstance(layout, PackLayout):
        raise refuse_type("layout", "a PackLayout", layout)
    if layout.dim not in (place, place + ndim):
        raise InvalidArgumentError(f"the layout has its features in dimension {layout.dim}, not {place}")
    order = [entry_path(key) for key in layout.keys]
    if set(order) != set(shapes):
        missing, more = sorted(set(order) - set(shapes)), sorted(set(shapes) - set(order))
        raise DifferentKeysError(
            f"the leaves are not those of the layout: {_listed(missing)} missing, {_listed(more)} not in the layout"
        )
    for path, shape in zip(order, layout.shapes, strict=True):
        if shapes[path] != shape:
            raise InvalidArgumentError(
                f"the features of {path_text(path)} have the shape {list(shapes[path])}, in the layout {list(shape)}"
            )
    return order


def _listed(paths: list[Path]) -> str:
    return f"{', '.join(map(path_text, paths))} is" if paths else "none is"


def _from_end(dim: int, ndim: int, what: str) -> int:
    """Return a dimension counted from the end."""
    if not -ndim <= dim < ndim:
        raise DimensionError(f"there is no dimension {dim} in {what}")
    return dim if dim < 0 else dim - ndim


def _dotted(path: Path) -> tuple[str, Path]:
    """Return what leaves are sorted by, the order of `tensordict`: their dotted names."""
    return ".".join(path), path


def _key(path: Path) -> NestedKey:
    return path[0] if len(path) == 1 else path


def _entries(td: Any, prefix: Path) -> Iterator[tuple[Path, Any]]:
    """Yield every entry, nested TensorDicts included."""
    for key in td._first_keys():
        entry = td._raw(key)
        yield (*prefix, key), entry
        if isinstance(entry, Container):
            _check_even(entry)
            yield from _entries(entry, (*prefix, key))


def _check_even(td: Any) -> None:
    td = unwrap(td)
    if isinstance(td, Container._stack_class) and any(
        set(part._first_keys()) != set(td._first_keys()) for part in td.tensordicts
    ):
        raise UnevenError("cannot pack a lazy stack whose elements have different keys", hint="select the common ones")


def _packable(path: Path, entry: Any) -> Tensor:
    if not isinstance(entry, Tensor) or not is_batched(entry):
        raise InvalidTypeError(
            f"cannot pack {path_text(path)}, which is no tensor of the batch but a {type(entry).__name__}",
            hint="td.filter_non_tensor_data() leaves values out, td.exclude(...) any entry",
        )
    if entry.is_nested or entry.layout is not torch.strided:
        raise InvalidTypeError(f"cannot pack {path_text(path)}, which is no dense tensor", hint="exclude it")
    return entry


def _check_alike(leaves: dict[Path, Tensor], order: list[Path]) -> None:
    for path in order[1:]:
        first, leaf = leaves[order[0]], leaves[path]
        if leaf.dtype != first.dtype:
            raise InvalidTypeError(
                f"cannot pack leaves of different dtypes: {path_text(order[0])} is {first.dtype}, "
                f"{path_text(path)} {leaf.dtype}",
                hint="cast them first, such as td.float()",
            )
        if leaf.device != first.device:
            raise DeviceError(
                f"cannot pack leaves of different devices: {path_text(order[0])} is on {first.device}, "
                f"{path_text(path)} on {leaf.device}",
                hint="move them first: td.to(device)",
            )
