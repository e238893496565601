"""TensorDictStore and LazyStackedTensorDictStore: a redis server by the names that users of those classes know.

Thin on purpose: `PersistentTensorDict` and the lazy stack over the redis backend are all there is to them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tdstore.container.core.container import Container
from tdstore.container.core.tensorclasses import rewrap, unwrap_all
from tdstore.container.functions.uneven_stacks import even
from tdstore.container.persistence.backend_names import REDIS_LIKE, on_server
from tdstore.container.persistence.saving import later, unlocked
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import open_container
from tdstore.errors import OptionError, StoreError, StoreNotFoundError, UnknownDatasetError, UnsupportedError
from tdstore.tensordicts.lazystack.stack import LazyStackedTensorDict
from tdstore.tensordicts.persistent.persistent import PersistentTensorDict
from tdstore.tensordicts.resident.tensordict import TensorDict
from tdstore.types import DeviceLike, SizeLike

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

T = TypeVar("T")


class TensorDictStore(PersistentTensorDict):
    """A TensorDict on a redis server, found again by its `td_id`.

    Args:
        backend: "redis", "dragonfly", "valkey" or "keydb": all speak one protocol.
        host, port, db, unix_socket_path: the server.
        prefix: the dataset is called `prefix/td_id`.
        batch_size: of a new dataset, or checked against the stored one.
        device: where reads land.
        td_id: name of an existing dataset, or of a new one; default: a new name.
        **options: of the redis backend, such as `password=` and `timeout=`.

    Example:
        >>> td = TensorDictStore(host="localhost", batch_size=[100])  # doctest: +SKIP
        >>> td["obs"] = torch.randn(100, 84)  # doctest: +SKIP
        >>> again = TensorDictStore.from_store(host="localhost", td_id=td.td_id)  # doctest: +SKIP
    """

    __slots__ = ()

    def __init__(
        self,
        *,
        backend: str = "redis",
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = None,
        client: Any = None,
        td_id: str | None = None,
        cache_metadata: bool = True,
        **server: Any,
    ) -> None:
        if client is not None:
            raise UnsupportedError("a client of another library cannot be used", hint="pass host=, port= and db=")
        place = _place(backend, td_id or uuid.uuid4().hex, server)
        super().__init__(batch_size=batch_size, mode="a", device=device, backend=place.pop("storage"), **place)

    @property
    def td_id(self) -> str:
        """Name of the dataset, to be given to `from_store`."""
        return _name(self._handle)

    def _dataset_lines(self) -> list[str]:
        # of nested entries, which are printed within their dataset: only where they are
        return _printed(self._handle)[: 1 if self._path else 2]

    def to_local(self) -> TensorDict:
        """Read the entries into memory, by one batched read."""
        return self.to_tensordict()

    def clear_redis(self) -> None:
        """Remove all entries from the server, and close."""
        self.clear()
        self.close()

    @classmethod
    def from_tensordict(
        cls, td: Any, *, backend: str = "redis", device: DeviceLike | None = None, **server: Any
    ) -> Self:
        """Put the entries of a TensorDict on a server, as a new dataset; arguments as those of the class."""
        place = _place(backend, uuid.uuid4().hex, server)
        return cls._over(td.save(mode="x", **place)._handle, device=device)

    @classmethod
    def from_dict(  # type: ignore[override]
        cls,
        input_dict: Mapping[Any, Any],
        *,
        auto_batch_size: bool | None = None,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = None,
        batch_dims: int | None = None,
        **server: Any,
    ) -> Self:
        """Put nested dicts, or a TensorDict, on a server, as a new dataset; see `TensorDict.from_dict`."""
        td = TensorDict.from_dict(
            input_dict, auto_batch_size=auto_batch_size, batch_size=batch_size, batch_dims=batch_dims
        )
        return cls.from_tensordict(td, device=device, **server)

    @classmethod
    def from_schema(
        cls,
        schema: Mapping[Any, Any],
        *,
        batch_size: SizeLike | None = None,
        backend: str = "redis",
        device: DeviceLike | None = None,
        **server: Any,
    ) -> Self:
        """Create a dataset of zeros that takes no room until rows are written; see `TensorDict.from_schema`."""
        place = _place(backend, uuid.uuid4().hex, server)
        td: Any = TensorDict.from_schema(schema, batch_size=batch_size, **place)
        return cls._over(td._handle, device=device)

    @classmethod
    def from_store(
        cls,
        *,
        td_id: str,
        backend: str = "redis",
        device: DeviceLike | None = None,
        tensorclass_cls: Any = None,
        **server: Any,
    ) -> Self:
        """Open the dataset of that name; with `tensorclass_cls`, as one of that class.

        Raises:
            UnknownDatasetError: the server has no dataset of that name. This is a KeyError, too.
        """
        server.pop("cache_metadata", None)
        td = cls._over(_existing(StoreHandle.open, _place(backend, td_id, server), td_id), device=device)
        return td if tensorclass_cls is None else tensorclass_cls.from_tensordict(td)


class LazyStackedTensorDictStore(LazyStackedTensorDict):
    """A lazy stack whose elements are on a redis server; they may differ in shape.

    This is the whole dataset. Its slices and nested entries are lazy stacks of parts of it, and are written through.

    Example:
        >>> stack = tdstore.lazy_stack([TensorDict(x=torch.zeros(2)), TensorDict(x=torch.zeros(3))])
        >>> stored = stack.to_store(host="localhost")  # doctest: +SKIP
        >>> again = LazyStackedTensorDictStore.from_store(td_id=stored.td_id, host="localhost")  # doctest: +SKIP
    """

    __slots__ = ()

    @classmethod
    def _of(cls, tds: Iterable[Any], dim: int, name: str | None = None, empty_batch_size: Sequence[int] = ()) -> Any:
        # What is made from the elements is no dataset: parts of one, or results in memory.
        return LazyStackedTensorDict._of(tds, dim, name, empty_batch_size)

    @property
    def td_id(self) -> str:
        """Name of the dataset, to be given to `from_store`."""
        return _name(self._dataset("td_id"))

    def _dataset_lines(self) -> list[str]:
        return [f"count={len(self._tds)}", *(_printed(self._binding[0]) if self._binding is not None else ())]

    def to_local(self) -> TensorDictBase:
        """Read the elements into memory.

        Returns:
            A TensorDict of the stack's batch size; a lazy stack if the elements differ in keys or shapes.
        """
        local = self._each(lambda td: td.to_tensordict())
        return local._resident() if even(local) else local

    def clear_redis(self) -> None:
        """Remove the entries of all elements from the server, and close."""
        self._dataset("clear_redis")
        for td in self._tds:
            td.clear()
        self.close()

    @classmethod
    def from_lazy_stack(
        cls, lazy_td: Any, *, backend: str = "redis", device: DeviceLike | None = None, **server: Any
    ) -> Self:
        """Put a lazy stack on a server, as a new dataset; arguments as those of `TensorDictStore`."""
        return cls._stored(unlocked(lazy_td.save(mode="x", **_place(backend, uuid.uuid4().hex, server))), device)

    @classmethod
    def from_store(cls, *, td_id: str, backend: str = "redis", device: DeviceLike | None = None, **server: Any) -> Self:
        """Open the lazy stack of that name.

        Raises:
            UnknownDatasetError: the server has no dataset of that name. This is a KeyError, too.
        """
        server.pop("cache_metadata", None)
        return cls._stored(_existing(open_container, _place(backend, td_id, server), td_id), device)

    @classmethod
    def _stored(cls, td: Any, device: Any) -> Self:
        if not isinstance(td, LazyStackedTensorDict):
            raise UnsupportedError(f"{td.filename} is not a lazy stack", hint="open it with TensorDictStore.from_store")
        made = cls(*td._tds, stack_dim=td._stack_dim, stack_dim_name=td._dim_name, device=device)
        made._binding, made._empty_batch_size, made._undo = td._binding, td._empty_batch_size, td._undo
        return made

    def _dataset(self, what: str) -> StoreHandle:
        if self._binding is None:
            raise StoreError(
                f"{what}: this stack is not the one over a dataset on a server",
                hint="use the one that to_store() or from_store() returned",
            )
        handle: StoreHandle = self._binding[0]
        return handle


def _on_redis(saved: Any, device: Any) -> Any:
    """Convert what `save` returned for a redis server to one of the two classes."""
    if isinstance(saved, Future):
        return later(lambda: _on_redis(saved.result(), device))
    tensorclass, (td,) = unwrap_all([saved])
    if isinstance(td, LazyStackedTensorDict):
        return rewrap(tensorclass, LazyStackedTensorDictStore._stored(td, device))
    made = TensorDictStore._over(td._handle, device=device)
    made._undo = td._undo
    return rewrap(tensorclass, made)


def _place(backend: str, name: str, server: dict[str, Any]) -> dict[str, Any]:
    if backend not in REDIS_LIKE:
        raise OptionError(f"backend={backend!r} is none of {', '.join(REDIS_LIKE)}", hint="they all speak one protocol")
    return on_server(backend, name, server)


def _existing(opener: Callable[..., T], place: dict[str, Any], name: str) -> T:
    try:
        return opener(mode="r+", **place)
    except StoreNotFoundError as error:
        raise UnknownDatasetError(
            f"there is no dataset of the name {name!r}: {error.message}", url=error.url, hint=error.hint
        ) from error


def _printed(handle: StoreHandle) -> list[str]:
    """List the lines of `repr` that name the dataset and its place."""
    return [f"backend={handle.backend.name!r}", f"td_id={_name(handle)!r}"]


def _name(handle: StoreHandle) -> str:
    return str(handle.location).rpartition("/")[2]


Container._on_redis = _on_redis
