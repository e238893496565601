"""Tensors that belong to a batch as a whole, and have no rows of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from tdstore.container.values.codecs import to_plain
from tdstore.container.values.nontensor import NonTensor
from tdstore.errors import BatchSizeError, MismatchError, UnsupportedError
from tdstore.index.shapes import as_size
from tdstore.index.tracing import traced
from tdstore.ops.rearrange import Padding
from tdstore.pickling import rebuild
from tdstore.types import SizeLike

LEAF = "data"
"""Below its key, a store keeps the tensor by this name."""


class UnbatchedTensor(Tensor, NonTensor):  # type: ignore[misc]  # methods of both: the tensor's own are used
    """A tensor of any shape as an entry: indexing, reshaping or stacking the TensorDict leaves it as it is.

    By itself it is a tensor like any other: torch functions, operators and methods act on its elements and give an
    `UnbatchedTensor` for each tensor. As an entry it takes part in leaf-wise maths and in reductions over all
    entries; methods that shape the batch, `torch.vmap` among them, pass it through.

    Args:
        data: a tensor, or what `torch.as_tensor` takes; gradients flow to it.
        batch_size: that of the TensorDict; an entry follows the TensorDict that holds it.

    Example:
        >>> td = TensorDict({"x": torch.zeros(3), "mean": UnbatchedTensor(torch.ones(7))}, [3])
        >>> td[0]["mean"].shape
        torch.Size([7])
        >>> (td + 1)["mean"][0]
        UnbatchedTensor(tensor(2.))
    """

    wrapped: Tensor
    """The plain tensor. This object is an alias of its memory, and all torch functions are run on it."""
    _batch_size: torch.Size

    def __new__(cls, data: Any, batch_size: SizeLike | None = None) -> UnbatchedTensor:
        if isinstance(data, UnbatchedTensor):
            if batch_size is None:
                return data
            data = data.wrapped
        wrapped = torch.as_tensor(data)
        self: UnbatchedTensor = wrapped.detach().as_subclass(cls)
        self.wrapped = wrapped
        self._batch_size = as_size(batch_size)
        return self

    @property
    def batch_size(self) -> torch.Size:
        """Batch size of the TensorDict that it is an entry of; `[]` outside of one."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: Any) -> None:
        self._batch_size = as_size(batch_size)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        sources = list(_found(args)) + list(_found(kwargs or {}))
        made = func(*_opened(args), **_opened(kwargs or {}))
        return _wrapped(made, sources) if sources else made

    def plain(self) -> UnbatchedTensor:
        """Return the entry itself."""
        return self

    def to_dict(self, **kwargs: Any) -> UnbatchedTensor:
        """Return the entry itself."""
        return self

    def flat(self) -> list[Any]:
        return [self.wrapped] * self.batch_size.numel()

    def same(self, other: object) -> bool:
        if not isinstance(other, UnbatchedTensor):
            return False
        a, b = self.wrapped, other.wrapped
        if a is b:
            return True
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) or traced():
            return False
        alias = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
        return alias or torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)

    def holding(self, data: Tensor) -> UnbatchedTensor:
        """Wrap another tensor for the same batch."""
        return UnbatchedTensor(data, self.batch_size)

    def for_batch(self, batch_size: torch.Size) -> UnbatchedTensor:
        """Return the same tensor for another batch; itself where that is its batch."""
        return self if batch_size == self._batch_size else UnbatchedTensor(self.wrapped, batch_size)

    def move(self, fn: Callable[[Tensor], Tensor]) -> UnbatchedTensor:
        """Return the same tensor for the new batch, also for rows added by padding."""
        if isinstance(fn, Padding):
            return self
        return self.for_batch(fn(torch.empty((), device="cpu").expand(self.batch_size)).shape)

    def spread(self, fn: Callable[[Tensor], Sequence[Tensor]]) -> list[NonTensor]:
        """Return the same tensor for each new batch."""
        return [self.for_batch(part.shape) for part in fn(torch.empty((), device="cpu").expand(self.batch_size))]

    def rows(self, rows: Tensor) -> UnbatchedTensor:
        """Return the same tensor for these rows."""
        return self.for_batch(torch.Size((*rows.shape, *self.batch_size[1:])))

    def own_copy(self) -> UnbatchedTensor:
        return self.holding(self.wrapped.clone())

    def joined(self, parts: Sequence[NonTensor], fn: Callable[[list[Tensor]], Tensor]) -> NonTensor:
        """Return the tensor that all parts hold.

        Raises:
            MismatchError: they hold different ones.
        """
        if not all(self.same(part) for part in parts):
            raise MismatchError(
                "these unbatched tensors differ, so that none of them belongs to the whole batch",
                hint="make them entries with rows before you join the TensorDicts",
            )
        return self.for_batch(fn([torch.empty((), device="cpu").expand(p.batch_size) for p in parts]).shape)

    def written(self, index: Any, part: NonTensor) -> NonTensor:
        if not self.same(part):
            raise UnsupportedError(
                "an unbatched tensor has no rows that could be written", hint="set the whole entry: td.set(key, value)"
            )
        return self

    def tensor_to_copy(self, key: str, value: Any, whole: bool) -> Tensor | None:
        """Return the tensor that an in-place write of `value` copies, checked and broadcast; None if nothing changes.

        Args:
            whole: write all of the entry; else some rows of the batch, which it does not have.

        Raises:
            UnsupportedError: rows that hold another tensor. BatchSizeError: another shape.
        """
        if not whole:
            if isinstance(value, NonTensor):
                self.written(None, value)
            return None
        if isinstance(value, NonTensor):
            value = value.wrapped if isinstance(value, UnbatchedTensor) else value.plain()
        made = value if isinstance(value, Tensor) else torch.as_tensor(value)
        try:
            return made.to(self.wrapped.device).expand(self.wrapped.shape)
        except RuntimeError:
            raise BatchSizeError(
                f"cannot write shape {list(made.shape)} into the unbatched tensor {key!r} "
                f"of shape {list(self.wrapped.shape)} in place"
            ) from None

    def compared(self, other: Any, op: Callable[..., Tensor]) -> UnbatchedTensor:
        """Compare element by element with a number, or with a tensor that has no batch either."""
        if isinstance(other, UnbatchedTensor):
            other = other.wrapped
        return self.holding(op(self.wrapped, other))

    def to_json(self) -> dict[str, Any]:
        """Return `{"unbatched": the tensor as a value}`, for documents that hold everything."""
        return {"unbatched": to_plain(self.wrapped.detach().cpu())}

    def _raw(self, key: str) -> Tensor:
        return {LEAF: self.wrapped}[key]

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = None if type(self) is UnbatchedTensor else type(self)
        return rebuild, ("UnbatchedTensor", cls, self.wrapped, self._batch_size)

    def __str__(self) -> str:
        return str(self.wrapped)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnbatchedTensor({self.wrapped!r})"


def rebuilt(cls: type[UnbatchedTensor] | None, wrapped: Tensor, batch_size: torch.Size) -> UnbatchedTensor:
    """Rebuild an unbatched tensor from its pickle."""
    return (cls or UnbatchedTensor)(wrapped, batch_size)


def is_batched(value: object) -> TypeGuard[Tensor]:
    """Check whether an entry is a tensor that starts with the batch dimensions: any tensor but an unbatched one."""
    return type(value) is Tensor or (isinstance(value, Tensor) and not isinstance(value, NonTensor))


def _found(value: Any) -> Iterator[UnbatchedTensor]:
    if isinstance(value, UnbatchedTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _found(part)
    elif isinstance(value, dict):
        yield from _found(list(value.values()))


def _opened(value: Any) -> Any:
    if isinstance(value, UnbatchedTensor):
        return value.wrapped
    if type(value) in (list, tuple):
        return type(value)(map(_opened, value))
    return {k: _opened(v) for k, v in value.items()} if type(value) is dict else value


def _wrapped(made: Any, sources: list[UnbatchedTensor]) -> Any:
    """Wrap the results of a torch function of the plain tensors as entries of the batch of the first."""
    if isinstance(made, Tensor):
        same = [u for u in sources if u.wrapped is made]
        return same[0] if same else sources[0].holding(made)
    if type(made) in (list, tuple):
        return type(made)([_wrapped(part, sources) for part in made])
    if isinstance(made, tuple) and type(made) is not torch.Size and any(isinstance(part, Tensor) for part in made):
        return type(made)([_wrapped(part, sources) for part in made])  # a named tuple of torch.return_types
    return made
