"""Moving a container to a device or a dtype."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from tdstore.arguments import as_device, refuse_type
from tdstore.container.core.container import Container
from tdstore.container.core.locks import ALIAS, LOCKED
from tdstore.container.core.one_buffer import is_one_buffer, moved
from tdstore.container.core.staging import move
from tdstore.container.core.tensor_attrs import FIELDS, TensorAttrs, asked, converted, described, recorded
from tdstore.container.entries.unbatched import is_batched
from tdstore.errors import BatchSizeError, DeviceError, InvalidStateError, InvalidTypeError, UnsupportedError
from tdstore.index.shapes import as_size
from tdstore.ops.cast import cast_all
from tdstore.threads import ThreadPool
from tdstore.types import DeviceLike

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict


class PlacingMixin(Container):
    """to, cpu, cuda, detach, requires_grad_, ..."""

    __slots__ = ()

    def _bytes_as(self, dtype: torch.dtype, batch_size: Any) -> Self:
        shape = self.batch_size if batch_size is None else as_size(batch_size)

        def seen(leaf: Tensor) -> Tensor:
            view = leaf.view(dtype)
            if not is_batched(leaf):
                return view
            if view.shape[: len(shape)] != shape:
                raise BatchSizeError(
                    f"a leaf of shape {list(leaf.shape)} and {leaf.dtype}, viewed as {dtype}, has the shape "
                    f"{list(view.shape)}, which does not start with the batch size {list(shape)}"
                )
            return view

        made: Any = self._resident().apply(seen, batch_size=shape, filter_empty=False, propagate_lock=True)
        old = list(self.keys(True, True))
        made._offer((weakref.ref(self), lambda v: v.exclude(*old)))
        return made  # type: ignore[no-any-return]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Convert to a device, a dtype, both, or those of another tensor or TensorDict.

        A stored TensorDict is read into memory for a dtype; a device is where its later reads arrive. Between the CPU
        and a CUDA device, large leaves are copied in blocks through pinned buffers, 64 MiB in all.

        Args:
            *args: a device, a `torch.dtype` (every leaf is cast, also integers), a tensor, or a TensorDict. A
                TensorDict of `TensorAttrs`, as `attrs` returns it, says for each leaf what it becomes.
            **kwargs: `device` and `dtype` by name; `non_blocking`, as in `Tensor.to`; `batch_size`, which is set in
                place; `inplace=True`, which changes this TensorDict instead of creating a new one; `cast_filter`,
                called with the path and the tensor of each leaf: those for which it is true get the dtype.

        Returns:
            This TensorDict if there is nothing to change, otherwise a new one. For a TensorDict, always a new one.

        Raises:
            TypeError: an argument is none of these, or given twice.
            RuntimeError: there is no such device.
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> td = TensorDict({"a": torch.arange(2)}, [2])
            >>> td.to(torch.float64)["a"].dtype, td.to("cpu").device
            (torch.float64, device(type='cpu'))
        """
        inplace, batch_size, other, anew, cast_filter = False, None, None, False, None
        if kwargs:
            cast_filter = kwargs.pop("cast_filter", None)
            kwargs.pop("num_threads", None), kwargs.pop("non_blocking_pin", None)
            inplace = kwargs.pop("inplace", False)
            batch_size = kwargs.pop("batch_size", None)
            other = kwargs.pop("other", None)
        if args and isinstance(args[0], (Container, Tensor, TensorAttrs)):
            other, args = args[0], args[1:]
            anew = isinstance(other, Container) and not inplace and not self._state & ~LOCKED
        device, dtype, non_blocking = None, None, False
        each = recorded(other) if isinstance(other, Container) else {}
        if each:
            pass  # every leaf has its own
        elif isinstance(other, TensorAttrs):
            device, dtype = other.tgt_device, other.tgt_dtype
        elif isinstance(other, Container):
            device, dtype = other.device, _common_dtype(other)
        elif isinstance(other, Tensor):
            device, dtype = other.device, other.dtype
        elif other is not None:
            raise refuse_type("other", "a tensor or a TensorDict", other)
        if args or kwargs:
            asked_device, asked_dtype, non_blocking = _asked(args, kwargs)
            device, dtype = asked_device or device, asked_dtype or dtype
        if batch_size is not None:
            self.batch_size = batch_size
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        # the device of another TensorDict is taken as it is, none too
        cleared = isinstance(other, Container) and not each and device is None and self._device is not None
        if not each and dtype is None and (device is None or device == self._device) and not cleared:
            if anew:
                same: Self = self.clone(recurse=False)
                return same.lock_() if self.is_locked else same
            return self
        if inplace and self.is_locked:
            raise self._refuse_locked("convert entries in place")
        made: Self = converted(self, each, non_blocking) if each else self
        if cast_filter is not None and dtype is not None:
            cast: Any = made
            made = cast._cast(dtype, cast_filter)
            made = made if device is None else made._to(device, None, non_blocking)
        elif device is not None or dtype is not None:
            made = made._to(device, dtype, non_blocking)
        if cleared:
            if made is self and not inplace:
                held: Any = self
                made = held.copy().lock_() if self.is_locked else held.copy()
            made.clear_device_()
        if not inplace:
            return made
        here: Any = self
        if type(self) is self._resident_class and here._binding is None:
            result: Self = here._become(made)  # with the nested TensorDicts, which others may hold
            return result
        if each or dtype is not None:
            self._whole("cast entries")
        self._assign(dict(made.items()))
        self._device = made._device if each else device or self._device
        return self

    def attrs(self, *, fields: Sequence[str] = FIELDS, num_threads: int | None = None) -> TensorDict:
        """Describe every leaf in a TensorDict of `TensorAttrs` without batch dimensions. Reads no leaf.

        Passed to `to`, the result makes each leaf of another TensorDict like the leaf of that name here. A leaf of a
        lazy stack has -1 for sizes that differ between elements, and the dtype as which all of them can be read.

        Args:
            fields: "device", "dtype" and "shape", or some of these.
            num_threads: accepted for compatibility.

        Raises:
            ValueError: an unknown field.

        Example:
            >>> td = TensorDict(a=torch.zeros(3), b=torch.zeros(3, dtype=torch.int32), batch_size=[3])
            >>> td.attrs()["b"]
            TensorAttrs(tgt_device=cpu, tgt_dtype=torch.int32, tgt_shape=torch.Size([3]))
            >>> TensorDict(a=torch.ones(2), b=torch.ones(2)).to(td.attrs(fields=["dtype"]))["b"].dtype
            torch.int32
        """
        return described(self, asked(fields))

    def _to(self, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Any:
        if device is not None and dtype is None and is_one_buffer(self):
            return moved(self, device, non_blocking)

        def convert(leaves: list[Tensor]) -> list[Tensor]:
            if dtype is None and device is not None:
                if device.type == "cpu" and all(t.is_cpu for t in leaves):
                    return leaves
                return move(leaves, device, non_blocking=non_blocking)
            if device is None and dtype is not None:
                return cast_all(leaves, dtype)
            return [t.to(device=device, dtype=dtype, non_blocking=non_blocking) for t in leaves]

        made: Self = self._resident()._foreach(convert)
        if made is not self and device is not None:
            made._set_device(device)
        return made

    def _set_device(self, device: torch.device | None) -> None:
        self._device = device
        for group in self._groups():
            group._set_device(device)

    def cpu(self, **kwargs: Any) -> Self:
        """Move to the CPU: `to("cpu")`.

        Args:
            **kwargs: those of `to`, such as `non_blocking`.

        Example:
            >>> TensorDict({"a": torch.zeros(2)}, [2]).cpu().device
            device(type='cpu')
        """
        return self.to("cpu", **kwargs)

    def cuda(self, device: DeviceLike | None = None, **kwargs: Any) -> Self:
        """Move to a GPU: `to("cuda")`, or to the one that a number, a name or a `torch.device` says.

        Args:
            device: the number of a GPU (also as a string), `"cuda"`, `"cuda:0"`, or such a `torch.device`.
            **kwargs: those of `to`, such as `non_blocking`.

        Raises:
            DeviceError: a device of another kind.
        """
        if type(device) is int or (isinstance(device, str) and device.isdigit()):
            device = f"cuda:{device}"
        wanted = as_device("cuda" if device is None else device)
        if wanted.type != "cuda":
            raise DeviceError(f"cuda() moves to a GPU, not to {wanted}", hint=f"td.to({str(wanted)!r})")
        return self.to(wanted, **kwargs)

    def auto_device_(self) -> Self:
        """Set the device to that of the leaves, if they share one; also in nested TensorDicts."""
        devices = {leaf.device for leaf in self._leaf_list()}
        if len(devices) == 1:
            self._set_device(devices.pop())
        return self

    def clear_device_(self) -> Self:
        """Remove the device, here and in nested TensorDicts: entries may then be on different devices."""
        self._set_device(None)
        return self

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all leaves, or None when they differ."""
        return _common_dtype(self)

    def detach(self) -> Self:
        """Return a TensorDict of detached leaves that share memory with these: gradients do not flow through them.

        Example:
            >>> td = TensorDict({"a": torch.ones(2, requires_grad=True)}, [2])
            >>> td.detach()["a"].requires_grad
            False
        """
        return self._without_graph(lambda leaves: [t.detach() for t in leaves])

    @property
    def data(self) -> Self:
        """A TensorDict of `leaf.data`."""
        return self._without_graph(lambda leaves: [t.data for t in leaves])

    def _without_graph(self, fn: Callable[[list[Tensor]], list[Tensor]]) -> Self:
        graph = False

        def cut(leaves: list[Tensor]) -> list[Tensor]:
            nonlocal graph
            graph = graph or True in [leaf.requires_grad for leaf in leaves]
            return fn(leaves)

        made: Self = self._resident()._foreach(cut)
        if graph:
            made._state |= ALIAS  # share_memory_ moves the tensors that require gradients, too
        return made

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set `requires_grad` of every leaf, in place.

        Args:
            requires_grad: whether gradients are recorded.

        Returns:
            This TensorDict.

        Raises:
            InvalidStateError: a leaf has integers or bools, which cannot require gradients; no leaf was changed.

        Example:
            >>> TensorDict({"a": torch.ones(2)}, [2]).requires_grad_()["a"].requires_grad
            True
        """
        leaves = self._leaf_list()
        mismatched = {leaf.dtype for leaf in leaves if not (leaf.is_floating_point() or leaf.is_complex())}
        if requires_grad and mismatched:
            raise InvalidStateError(
                f"only floating-point and complex leaves can require gradients, not {mismatched.pop()}"
            )
        for leaf in leaves:
            leaf.requires_grad_(requires_grad)
        return self

    def as_tensor(self) -> Self:
        """Return a TensorDict of plain tensors over the same memory, instead of memory-mapped ones, parameters, ..."""
        made: Self = self._resident()._foreach(lambda leaves: [_plain(t) for t in leaves])
        return made

    def pin_memory(self, num_threads: int | None = None, inplace: bool = False) -> Self:
        """Copy into page-locked memory, from which a GPU reads while the CPU goes on.

        On a machine without an accelerator pinning has no use: the leaves stay as they are.

        Args:
            num_threads: the number of leaves to pin at a time, in threads (default and 0: one after another, which is
                faster but for a few large ones: torch copies each with all of its threads).
            inplace: this TensorDict takes over the copies and is returned.
        """

        def pin(leaves: list[Tensor]) -> list[Tensor]:
            if not torch.accelerator.is_available():
                return leaves
            if not num_threads or len(leaves) < 2:
                return [t.pin_memory() for t in leaves]
            with ThreadPool(num_threads) as pool:
                return list(pool.map(torch.Tensor.pin_memory, leaves))

        live = self._resident() if isinstance(self, Container._stored_class) else self
        return self._apply_inplace_result(live._foreach(pin), "pin memory", inplace)

    def pin_memory_(self, num_threads: int | str = 0) -> Self:
        """Move the leaves into page-locked memory in place; see `pin_memory`."""
        made: Self = self.pin_memory(None if num_threads == "auto" else int(num_threads), inplace=True)
        return made

    def record_stream(self, stream: torch.Stream) -> Self:
        """Tell the allocator that a CUDA stream uses the leaves: see [`torch.Tensor.record_stream`][].

        Raises:
            UnsupportedError: the leaves are in a store: `to(device)` returns a TensorDict of live ones.
        """
        if isinstance(self, Container._stored_class):
            raise UnsupportedError("no stream can use leaves that are not read yet", hint="td.to(device) reads them")
        for leaf in self._leaf_list():
            leaf.record_stream(stream)
        return self


def _asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """Parse the arguments of `to` as `Tensor.to` does. torch.compile cannot trace torch's own parser."""
    if len(args) == 1 and not kwargs:  # the common case
        if isinstance(args[0], torch.dtype):
            return None, args[0], False
        if type(args[0]) is torch.device or type(args[0]) is str:
            return as_device(args[0]), None, False
    names: tuple[str, ...] = ("device", "dtype", "non_blocking")
    if args and isinstance(args[0], (torch.dtype, bool)):
        names = names[1:] if isinstance(args[0], torch.dtype) else names[2:]
    arguments = dict(zip(names, args, strict=False))
    mismatched = [*(set(kwargs) - {"device", "dtype", "non_blocking"}), *(set(kwargs) & set(arguments))]
    if mismatched or len(args) > len(names):
        raise InvalidTypeError(f"to() takes a device, a dtype and non_blocking, once each, not {args} and {kwargs}")
    arguments.update(kwargs)
    device, dtype = arguments.get("device"), arguments.get("dtype")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidTypeError(f"to() takes a torch.dtype, not {dtype!r}")
    return None if device is None else as_device(device), dtype, bool(arguments.get("non_blocking", False))


def _plain(leaf: Tensor) -> Tensor:
    return leaf if type(leaf) is Tensor or leaf.is_nested else leaf.as_subclass(Tensor)


def _common_dtype(td: Any) -> torch.dtype | None:
    plain = td._memory_leaves()
    dtypes = set() if plain is None else {leaf.dtype for leaf in plain}
    stack = [td] if plain is None else []
    while stack:
        node = stack.pop()
        for key in node._first_keys():
            kind = node._kind(key)
            if kind == "leaf":
                dtypes.add(node._leaf_facts(key).dtype)
            elif kind == "group":
                stack.append(node._raw(key))
    return dtypes.pop() if len(dtypes) == 1 else None
