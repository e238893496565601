"""TensorAttrs: device and dtype of leaves, and a TensorDict of them as the target of `to`.

`tdstore.TensorAttrs`, `td.attrs()` and `td.to(attrs)` are public, and state dicts hold such entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from tdstore.arguments import as_device
from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.values.nontensor import MetaData
from tdstore.errors import InvalidArgumentError
from tdstore.index.shapes import as_size
from tdstore.types import SizeLike

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict

FIELDS = ("device", "dtype", "shape")

ContainerT = TypeVar("ContainerT", bound=Container)


class TensorAttrs(MetaData):
    """The device, dtype and shape of one leaf; None for what is not said. `td.to` takes a TensorDict of these.

    Example:
        >>> like = TensorDict(a=TensorAttrs(tgt_dtype=torch.float16))
        >>> made = TensorDict(a=torch.zeros(2), b=torch.zeros(2)).to(like)
        >>> made["a"].dtype, made["b"].dtype
        (torch.float16, torch.float32)
    """

    __slots__ = ()

    def __init__(
        self,
        tgt_device: Any = None,
        tgt_dtype: torch.dtype | None = None,
        tgt_shape: Any = None,
        *,
        batch_size: SizeLike | None = None,
        device: object = None,
        names: object = None,
    ) -> None:
        at = None if tgt_device is None else as_device(tgt_device)
        size = None if tgt_shape is None else as_size(tgt_shape)
        super().__init__(dict(zip(FIELDS, (at, tgt_dtype, size), strict=True)), batch_size)

    @classmethod
    def from_data(cls, data: Any, batch_size: SizeLike | None = None) -> Self:
        """Build an instance from the `data` of another, as it was stored.

        Raises:
            InvalidArgumentError: it is something else.
        """
        if not isinstance(data, dict) or tuple(data) != FIELDS or not isinstance(data["dtype"], torch.dtype | None):
            raise InvalidArgumentError(f"not the attributes of a tensor: {str(data)[:80]}")
        try:
            return cls(*data.values(), batch_size=batch_size)
        except (TypeError, RuntimeError) as error:
            raise InvalidArgumentError(f"not the attributes of a tensor: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """Return the record of `MetaData`, marked as this class."""
        return {**super().to_json(), "attrs": True}

    @classmethod
    def from_tensor(cls, tensor: Tensor, *, fields: Sequence[str] = FIELDS) -> Self:
        """Describe a tensor, with all or some of its attributes."""
        return cls(**{f"tgt_{name}": getattr(tensor, name) for name in asked(fields)})

    @property
    def tgt_device(self) -> torch.device | None:
        """The device."""
        return self.data["device"]  # type: ignore[no-any-return]

    @property
    def tgt_dtype(self) -> torch.dtype | None:
        """The dtype."""
        return self.data["dtype"]  # type: ignore[no-any-return]

    @property
    def tgt_shape(self) -> torch.Size | None:
        """The shape, for the reader: `to` leaves shapes alone."""
        return self.data["shape"]  # type: ignore[no-any-return]

    def plain(self) -> Self:
        """Return the object itself, which is what `td[key]` returns."""
        return self

    def for_batch(self, batch_size: torch.Size) -> TensorAttrs:
        return TensorAttrs(*self.data.values(), batch_size=batch_size)

    def __repr__(self) -> str:
        said = (f"tgt_{name}={value}" for name, value in self.data.items() if value is not None)
        return f"TensorAttrs({', '.join(said)})"


def asked(fields: Sequence[str]) -> tuple[str, ...]:
    """Check the names of attributes, and return them."""
    names = (fields,) if isinstance(fields, str) else tuple(fields)
    if mismatched := [name for name in names if name not in FIELDS]:
        raise InvalidArgumentError(f"a tensor's attributes are {', '.join(FIELDS)}, not {mismatched[0]!r}")
    return names


def described(td: Any, fields: tuple[str, ...]) -> TensorDict:
    """Build a TensorDict without batch dimensions from the `TensorAttrs` of the leaves of `td`. Reads no leaf."""
    made = {}
    for key in td._first_keys():
        kind = td._kind(key)
        if kind == LEAF:
            shape, device, dtype = td._leaf_facts(key)[:3]
            facts = {"device": device, "dtype": dtype, "shape": shape}
            made[key] = TensorAttrs(**{f"tgt_{name}": facts[name] for name in fields})
        elif kind == GROUP:
            made[key] = td._raw(key).attrs(fields=fields)
        else:
            value = td._raw(key)
            one = value.for_batch(torch.Size(()))
            made[key] = value if one is None else one
    found: TensorDict = td._resident_class(made)
    return found


def recorded(td: Any) -> dict[tuple[str, ...], TensorAttrs]:
    """Return the `TensorAttrs` in a TensorDict, by path."""
    found: dict[tuple[str, ...], TensorAttrs] = {}
    for key in td._first_keys():
        kind = td._kind(key)
        if kind == GROUP:
            found.update({(key, *path): attrs for path, attrs in recorded(td._raw(key)).items()})
        elif kind != LEAF and isinstance(value := td._raw(key), TensorAttrs):
            found[(key,)] = value
    return found


def converted(td: ContainerT, found: dict[tuple[str, ...], TensorAttrs], non_blocking: bool) -> ContainerT:
    """Return the entries of `td`, with the leaves that are in `found` converted to the device and dtype given there."""

    def convert(key: str | tuple[str, ...], leaf: Tensor) -> Tensor:
        attrs = found.get(key if isinstance(key, tuple) else (key,))
        if attrs is None:
            return leaf
        return leaf.to(attrs.tgt_device or leaf.device, attrs.tgt_dtype or leaf.dtype, non_blocking)

    source = td._walkable()
    if any(attrs.tgt_device not in (None, td.device) for attrs in found.values()):
        source = source.clone(False).clear_device_()
    made: ContainerT = source.named_apply(convert, nested_keys=True)
    return made
