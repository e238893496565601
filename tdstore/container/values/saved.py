"""Saving and loading of a value by itself: a dataset whose only entry it is, on every backend."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from tdstore.errors import DifferentKeysError

if TYPE_CHECKING:
    from tdstore.container.values.nontensor import NonTensor

    Saved: TypeAlias = NonTensor | Future[NonTensor]


class SavedValues:
    """save, load, memmap, to_h5, consolidate, state_dict of a value that no TensorDict holds.

    What is saved is found by `tdstore.open`, `TensorDict.load` and `load` here. A value that was loaded is in memory:
    nothing that is written into it reaches the dataset.

    Example:
        >>> saved = NonTensorData("hello", batch_size=[3]).save("greeting")
        >>> tdstore.load("greeting")
        NonTensorData(data=hello, batch_size=torch.Size([3]), device=None)
    """

    __slots__ = ()

    def save(self: Any, prefix: Any = None, copy_existing: bool = False, **kwargs: Any) -> Saved:
        """Save as a dataset of its own, with the arguments of `TensorDict.save`, and return a copy of the value.

        Raises:
            UntrustedDataError: the value is not plain data, has no codec, and `trust` is not True.
        """
        value: Saved = _value_of(self._stored_form().save(prefix, copy_existing, **kwargs))
        return value

    dumps = save

    def memmap(self: Any, prefix: Any = None, copy_existing: bool = False, **kwargs: Any) -> Saved:
        """Save as a folder, and return a copy of the value; without `prefix`, return the entry itself."""
        value: Saved = self
        if prefix is not None:
            value = _value_of(self._stored_form().memmap(prefix, copy_existing, **kwargs))
        return value

    memmap_like = memmap

    def memmap_(self, prefix: Any = None, copy_existing: bool = False, **kwargs: Any) -> Self:
        """Save as a folder, if there is a `prefix`, and return the entry itself."""
        saved = self.memmap(prefix, copy_existing, **kwargs)
        if isinstance(saved, Future):
            saved.result()
        return self

    def to_h5(self: Any, filename: Any, **kwargs: Any) -> NonTensor:
        """Save as an HDF5 file, with the arguments of `TensorDict.to_h5`, and return a copy of the value."""
        value: NonTensor = _value_of(self._stored_form().to_h5(filename, **kwargs))
        return value

    def consolidate(self: Any, filename: Any = None, **kwargs: Any) -> NonTensor:
        """Save as one file, and return a copy of the value; without `filename`, return the entry itself."""
        value: NonTensor = self if filename is None else self._stored_form().consolidate(filename, **kwargs)
        return value

    @classmethod
    def load(cls: Any, location: Any = None, *args: Any, **kwargs: Any) -> NonTensor:
        """Load the value that a dataset is, with the arguments of `TensorDict.load`.

        Raises:
            DifferentKeysError: it is a TensorDict.
        """
        return _checked(cls._container.load(location, *args, **kwargs))

    load_memmap = load

    @classmethod
    def from_consolidated(cls: Any, filename: Any, **kwargs: Any) -> NonTensor:
        """Load the value that a consolidated file is. DifferentKeysError: it is a TensorDict."""
        return _checked(cls._container.from_consolidated(filename, **kwargs))

    def load_(self, prefix: Any, *args: Any, **kwargs: Any) -> Self:
        """Take over the value that a dataset is. DifferentKeysError: it is a TensorDict."""
        me: Any = self
        me.update(self.load(prefix, *args, **kwargs))
        return self

    load_memmap_ = load_

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return an ordered dict without tensors; its `_metadata` has the value. It takes what `TensorDict`'s takes."""
        made: dict[str, Any] = self._stored_form().state_dict(*args, **kwargs)
        return made

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Self:
        """Take over the value of a state dict; one without a value changes nothing.

        Raises:
            StateDictError: it has other entries.
        """
        me: Any = self
        form = me._stored_form()
        form.load_state_dict(state_dict, *args, **kwargs)
        me.update(form.get("data"))
        return self

    def close(self) -> None:
        """Return at once: a value is in memory, and no dataset is open."""


def _value_of(saved: Any) -> Any:
    """Return a copy of the value in a stored form that was saved; close the dataset."""
    if isinstance(saved, Future):
        value: Future[Any] = Future()
        saved.add_done_callback(lambda done: _settle(value, done))
        return value
    made = saved.get("data").clone()
    saved.close()
    return made


def _settle(value: Future[Any], saved: Future[Any]) -> None:
    try:
        value.set_result(_value_of(saved.result()))
    except BaseException as error:
        value.set_exception(error)


def _checked(found: Any) -> NonTensor:
    if not isinstance(found, SavedValues):
        keys = sorted(found.keys())[:8]
        raise DifferentKeysError(
            f"a TensorDict of {keys} is stored there, and no value", hint="TensorDict.load loads it"
        )
    value: NonTensor = found  # type: ignore[assignment]  # the only class of this mixin's
    return value
