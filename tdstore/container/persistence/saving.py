"""Saving and loading: the same methods for every backend."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from torch import Tensor

from tdstore.arguments import as_device
from tdstore.container.core.container import Container
from tdstore.container.core.locks import LOCKED
from tdstore.container.core.one_buffer import consolidated_faults
from tdstore.container.core.preallocation import mark_allocated
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.persistence.schema import SchemaEntry, allocation, check_sizes, flat_schema, in_memory_entry
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import allocate, open_container, over, write
from tdstore.container.values.codecs import pickling
from tdstore.container.values.nontensor import NonTensor
from tdstore.errors import InvalidTypeError, LockedError, OptionError, StoreExistsError, UnsupportedError
from tdstore.header import Group
from tdstore.index.shapes import as_size
from tdstore.io.opening import DEFAULT_ON_DISK, Location, Storage
from tdstore.ops.base import check_container
from tdstore.store import Cap
from tdstore.threads import ThreadPool
from tdstore.types import DeviceLike, Fault, IndexType, Mode, NamesLike, NestedKey, Path, SizeLike

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

_KEPT = (Cap.PERSISTENT | Cap.SHARED).value
_LOCATION_NAMES = ("location", "prefix", "filename", "url")


def trusting(allow_pickle: bool | None) -> dict[str, bool]:
    """Return the option of a store that stands for `allow_pickle=`.

    Raises:
        OptionError: it is neither a bool nor None.
    """
    if not isinstance(allow_pickle, (bool, type(None))):
        raise OptionError(f"allow_pickle is True, False or None, not {allow_pickle!r}")
    return {"trust": True} if allow_pickle else {}


class SavingMixin(Container):
    """save, load, from_schema, read, close."""

    __slots__ = ()

    _binding: Any

    # -- out ---------------------------------------------------------------------------------
    @overload
    def save(
        self,
        prefix: Location = None,
        copy_existing: bool = False,
        *,
        location: Location = None,
        storage: Storage = None,
        mode: Mode = "w",
        existsok: bool = True,
        num_threads: int = 0,
        return_early: Literal[False] = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        atomic: bool = True,
        archive: bool | None = None,
        progress: bool = False,
        trust: bool | str | None = None,
        **options: Any,
    ) -> TensorDictBase: ...
    @overload
    def save(
        self, prefix: Location = None, copy_existing: bool = False, *, return_early: Literal[True], **options: Any
    ) -> Future[TensorDictBase]: ...
    def save(
        self,
        prefix: Location = None,
        copy_existing: bool = False,
        *,
        location: Location = None,
        storage: Storage = None,
        mode: Mode = "w",
        existsok: bool = True,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        atomic: bool = True,
        archive: bool | None = None,
        progress: bool = False,
        trust: bool | str | None = None,
        **options: Any,
    ) -> Any:
        """Save as a new dataset, and return the TensorDict over it.

        A save is all or nothing: until its last step, readers see the old dataset, if there is one. The result is
        locked: rows can be written in place, and are written to the dataset; keys stay as they are.

        Args:
            prefix: path or URL; `location` is the same. A plain path is a directory of memory-mapped files.
            copy_existing: accepted for compatibility: a save always copies.
            storage: name of the backend. Default: found from the location.
            mode: "w" replaces an existing dataset, "x" refuses to.
            existsok: False is `mode="x"`.
            num_threads: accepted for compatibility, as are `share_non_tensor`, `robust_key` and `atomic`: every save is
                atomic.
            return_early: return a future at once, and save in a thread.
            archive: True makes one file, an archive like that of a `.tdz` name (backend "tdz", with `compression=`);
                False makes a directory, whatever the name.
            progress: show a bar.
            trust: True pickles values that are neither plain data nor have a codec. Readers must then pass `trust=True`
                too, since unpickling may run any code. Any other value is an option of the backend.
            **options: those of the backend, and `leaf_options={key: {...}}` for single entries (h5: chunks, ...).

        Raises:
            StoreExistsError: something exists there, and `mode="x"`; or what exists there is not a dataset.
            UntrustedDataError: a value is not plain data, has no codec, and `trust` is not True.
            OptionError: a mode other than "w" and "x", or an option that the backend does not have.

        Example:
            >>> saved = TensorDict({"a": torch.arange(3)}, [3]).save("runs/1")
            >>> saved.is_locked, TensorDict.load("runs/1")["a"].tolist()
            (True, [0, 1, 2])
        """
        where = prefix if prefix is not None else location
        if archive is not None and storage is None:
            storage = "tdz" if archive else "memmap" if str(where).lower().endswith(".tdz") else None
        where = absolute(where, storage) if return_early else where
        if mode not in ("w", "x"):
            raise OptionError(f"save takes mode 'w' or 'x', not {mode!r}")
        how: Mode = mode if existsok else "x"

        if trust is not None:
            options["trust"] = trust

        def run() -> Any:
            with pickling(trust is True):
                handle = write(self, where, storage, how, options, progress)
            td = over(handle)
            _lock_stored(td, handle)
            td._undo = "close"  # with td.save(...) as saved: closes it
            return td

        return later(run) if return_early else run()

    dumps = save

    def _become(self, other: Any) -> Self:
        raise UnsupportedError(
            f"a {type(self).__name__} stays where it is stored", hint="use the form that returns a new TensorDict"
        )

    def _apply_inplace_result(self, result: Any, what: str, inplace: bool) -> Self:
        if not inplace:
            return result  # type: ignore[no-any-return]
        if self.is_locked:
            raise self._refuse_locked(what)
        return self._become(result)

    # -- in ----------------------------------------------------------------------------------
    @classmethod
    def load(
        cls,
        location: Location = None,
        device: DeviceLike | None = None,
        non_blocking: bool = False,
        *,
        storage: Storage = None,
        mode: Mode | None = "r",
        prefix: Location = None,
        out: TensorDictBase | None = None,
        robust_key: bool | None = True,
        num_threads: int = 0,
        allow_pickle: bool | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Open a dataset of any backend.

        The result is over the dataset: its entries are read when they are used, not now. In mode "r" nothing is ever
        changed; "r+" writes changes through to the dataset. `to_tensordict()` of the result is a copy in memory.

        Args:
            location: path or URL; `prefix` is the same.
            device: the device of the tensors. To another device than the CPU they are copied at once; `"meta"` returns
                only shapes and dtypes, and reads no data.
            non_blocking: accepted for compatibility.
            storage: name of the backend. Default: found from the location.
            mode: "r", or "r+" to change the dataset. None is "r".
            out: a TensorDict whose entries are replaced by those of the dataset, and which is returned.
            robust_key: accepted for compatibility, as is `num_threads`.
            allow_pickle: the same as `trust=True`: read pickled values. Unpickling may run any code that the writer of
                the dataset chose. Without it, pickled values raise `UntrustedDataError`.
            **kwargs: `subpath=` (open a nested TensorDict only), and options of the backend.

        Returns:
            A `TensorDict` of live tensors if the backend has them (memmap, shared memory), otherwise a
            `PersistentTensorDict`. For a value that was saved by itself, the value, in memory.

        Raises:
            OptionError: mode "w" or "x", which would create a new dataset; nothing is touched.
            StoreNotFoundError: there is no dataset at the location.
            CorruptStoreError: the dataset is damaged.
            DirtyStoreError: a writer ended in the middle of a change.
            UntrustedDataError: a value is pickled, and `allow_pickle` is not set.
            PluginError: the backend's plugin is missing or failed.

        Example:
            >>> saved = TensorDict({"a": torch.arange(3)}, [3]).save("run")
            >>> TensorDict.load("run")["a"].tolist()
            [0, 1, 2]
        """
        mode = "r" if mode is None else mode
        refuse_new(mode, "load")
        kwargs.update(trusting(allow_pickle))
        td = open_container(location if location is not None else prefix, storage=storage, mode=mode, **kwargs)
        if isinstance(td, NonTensor):  # saved by itself; values have no device
            return td if out is None else out._become(require_container(td))
        if device is not None and as_device(device).type == "meta":
            if jagged := [key for node, key in td._leaf_places() if node._leaf_layout(key) is torch.jagged]:
                raise UnsupportedError(
                    f"the nested tensor {jagged[0]!r} has no shape without its rows", hint="exclude it"
                )
            td = td._as_meta()
        elif device is not None:
            td = td.to(device)
        return td if out is None else out._become(td)

    def load_(self, prefix: Location, *args: Any, **kwargs: Any) -> Self:
        """Replace the entries by those of a dataset; entries that it does not have are removed.

        A device of None stays None: then new entries may be on any device. A TensorDict on a GPU stays there. A locked
        TensorDict stays locked.

        Raises:
            LockedError: this TensorDict is locked, and the dataset has other keys.
            InvalidTypeError: the dataset is a value by itself.
        """
        anywhere, locked = self._device is None, self.is_locked
        found = require_container(self.load(prefix, *args, **kwargs))
        if locked and {*self.keys(True)} != {*found.keys(True)}:
            raise LockedError("cannot load a dataset with other keys: the TensorDict is locked")
        on_gpu = self._device is not None and self._device.type == "cuda"
        td = self._become(found.to(self._device) if on_gpu else found)
        if anywhere and td._device is not None:
            td._set_device(None)
        return td.lock_() if locked else td

    @classmethod
    def from_schema(
        cls,
        schema: Mapping[Any, object],
        *,
        batch_size: SizeLike | None = None,
        storage: Storage = None,
        device: DeviceLike | None = None,
        names: NamesLike = None,
        mode: Mode | None = None,
        existsok: bool = False,
        **options: Any,
    ) -> TensorDictBase:
        """Allocate a dataset from shapes and dtypes, without holding its data in memory.

        Every leaf reads as its fill value, zeros by default, until it is written. A dataset larger than memory can be
        allocated this way and filled row by row.

        Args:
            schema: `key -> (shape, dtype)`, a dtype, or a `LeafSpec` with options of its own; nested dicts and tuple
                keys make nested TensorDicts. Shapes do not include the batch size. One dimension may be -1: the entry
                is then a jagged tensor, whose rows are empty at first. `str` or `object` stands for one value per row,
                None at first; a `NonTensorData` is the value of the whole batch.
            batch_size: leading shape of every leaf, `[*B]`.
            storage: backend name or URL. Default: found from the location, or in memory if there is none.
            device: the device of the entries.
            names: names of the batch dimensions.
            mode: "x" (default) refuses an existing target; "w" replaces it.
            existsok: True is `mode="w"`.
            **options: `location=` (or `prefix=`, `filename=`), and options of the backend.

        Raises:
            StoreExistsError: something is at the location, and `mode` is not "w".
            OptionError: any other mode, an option that the backend does not have, or any option in memory.
            BatchSizeError: an entry would have more bytes than a tensor can have.

        Example:
            >>> td = TensorDict.from_schema({"obs": ((4,), "uint8"), ("next", "obs"): ((4,), "uint8")}, batch_size=[8])
            >>> td["next", "obs"].shape
            torch.Size([8, 4])
            >>> grows = TensorDict.from_schema({"tokens": ((-1,), "int64"), "text": str}, batch_size=[0])
            >>> grows.append({"tokens": [5, 1, 3], "text": "a b c"})
            >>> grows.append({"tokens": [5], "text": "a"})
            >>> [row.tolist() for row in grows["tokens"].unbind()], list(grows["text"])
            ([[5, 1, 3], [5]], ['a b c', 'a'])
        """
        batch = as_size(batch_size)
        entries = flat_schema(schema)
        check_sizes(entries, batch)
        location = next((options.pop(n) for n in _LOCATION_NAMES if options.get(n) is not None), None)
        for name in _LOCATION_NAMES:
            options.pop(name, None)
        if storage is None and location is None:
            if options:
                raise OptionError(f"an in-memory TensorDict has no option {next(iter(options))!r}")
            td: TensorDictBase = _in_memory(cls._resident_class, entries, batch, device, names)
            mark_allocated(td)
            return td
        where = None if device is None else str(as_device(device))
        plan = allocation(entries, batch)
        groups = _groups_of(entries, plan.values, batch, where, None if names is None else tuple(names))
        how: Mode = mode or ("w" if existsok else "x")
        if how not in ("w", "x"):
            raise OptionError(f"from_schema takes mode 'x' or 'w', not {how!r}")
        try:
            handle = allocate(groups, plan.specs, location, storage, how, options, plan.writes, device)
            td = over(handle)
        except StoreExistsError as error:
            if error.hint is None or "mode='w'" in error.hint:  # else that mode does not replace it either
                error.hint = "pass mode='w' to replace it"
            raise
        if storage == "memmap":  # as memmap() says it, of temporary files too
            td._set_device(torch.device("cpu"))
            td._mark_mapped()
        _lock_stored(td, handle)
        td._undo = "close"
        mark_allocated(td)
        return td

    # -- over a store ------------------------------------------------------------------------
    def _owned(self, what: str) -> tuple[Any, Path]:
        binding = getattr(self, "_binding", None)
        if binding is None:
            raise UnsupportedError(
                f"{what}: this TensorDict is not the one over a dataset, memory-mapped or opened",
                hint="use the TensorDict that save(), memmap() or load(mode='r+') returned",
            )
        handle, path = binding
        handle.check_writable()
        return handle, path

    def close(self) -> None:
        """Commit in-place writes and close the dataset, if this TensorDict is over one.

        Afterwards every use of the entries raises `StoreClosedError`. In memory, and in later calls, nothing happens.
        A `with` block over a result of `save`, `load` or `from_schema` closes the dataset.

        Raises:
            StoreError: the writes could not be committed, for example on a full disk.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3]).save("run")
            >>> td["a"][0] = 1.0
            >>> td.close()
            >>> TensorDict.load("run")["a"].tolist()
            [1.0, 0.0, 0.0]
        """
        binding = getattr(self, "_binding", None)
        if binding is not None:
            binding[0].close()

    def commit(self, message: str | None = None) -> Self:
        """Make in-place writes to the dataset durable now, instead of at `close()`.

        Checksums of what was written are renewed, so that later readers can verify it. Where nothing was written since
        the last commit, as after `append`, nothing is done.

        Args:
            message: make this commit a version, with this text: `tdstore.versions` lists it, and
                `tdstore.open(location, version=...)` reads it, whatever is written later.

        Returns:
            This TensorDict.

        Raises:
            UnsupportedError: this TensorDict is not over a dataset; or `message`, and the backend has no versions.
            ReadOnlyError: the dataset was opened in mode "r".
            StoreClosedError: it was closed.
            InvalidStateError: a transaction is open, which commits at its end.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3]).save("run")
            >>> td.zero_().commit().verify()
            []
        """
        handle, _ = self._owned("commit")
        if message is None:
            handle.refuse_in_transaction("td.commit()")
            handle.commit_changes()
        else:
            handle.commit_version(message)
        return self

    @contextmanager
    def transaction(self) -> Iterator[Self]:
        """Make all changes in a `with` block one commit of rows and structure, completely or not at all.

        At the end of the block everything is committed at once. If the block raises, the dataset and this
        TensorDict are as they were before it. Other processes see nothing until the end. In the block, `commit`,
        `refresh_`, `close`, `file` and pickling are refused: they would commit a part of the changes.

        Raises:
            UnsupportedError: rows reach other processes as soon as they are written (memory-mapped and shared data), or
                the backend cannot undo what was written.
            InvalidStateError: a transaction is open already.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3]).save("counts.h5", storage="h5")
            >>> with td.transaction():
            ...     td["a"] = torch.ones(3)
            ...     td["b"] = torch.arange(3)
            >>> sorted(td.keys())
            ['a', 'b']
        """
        handle, _ = self._owned("transaction")
        with handle.transaction():
            yield self

    def verify(self) -> list[Fault]:
        """Read all data of this TensorDict's dataset, and compare it with the checksums of its last commit.

        Returns:
            A `Fault` for each leaf that differs from what was committed: its path in the dataset, and the reason. Empty
            if there is none, and for data in memory. Leaves that were written since the commit are not compared.

        Raises:
            StoreClosedError: the dataset was closed.

        Example:
            >>> TensorDict({"a": torch.ones(3)}, [3]).memmap().verify()
            []
        """
        binding = getattr(self, "_binding", None)
        if binding is None:
            return consolidated_faults(self)
        handle, path = binding
        found: list[Fault] = handle.store.verify(handle.leaves_below(path))
        return found

    # -- reading -----------------------------------------------------------------------------
    def read(
        self, index: IndexType = None, keys: NestedKey | Sequence[NestedKey] | None = None, out: Self | None = None
    ) -> Self:
        """Read rows now: all entries in one batch, into fresh memory or into buffers of the caller.

        `td[index]` of a stored TensorDict reads nothing yet; `read(index)` requests all entries of the store together.

        Args:
            index: a batch index, as in `td[index]`. Default: everything.
            keys: a (nested) key or a list of them. Default: all.
            out: a TensorDict of buffers with the shapes and dtypes of the result. They are filled, and `out` is
                returned.

        Returns:
            A TensorDict in memory, of the batch size of `td[index]`.

        Raises:
            KeyNotFoundError: there is no such key, or `out` lacks one.
            BatchSizeError: a buffer has another shape or dtype.
            CorruptStoreError: the data that was read does not match its checksum.
            ReadOnlyError: `out`, or a TensorDict in it, was opened for reading.
            StoreClosedError: the dataset was closed.

        Example:
            >>> td = TensorDict({"a": torch.arange(10), "b": torch.zeros(10, 4)}, [10]).memmap()
            >>> td.read(slice(2, 5), keys=["a"])["a"].tolist()
            [2, 3, 4]
        """
        td = self if index is None else self._at(index)
        if keys is not None:
            td = td.select(*([keys] if isinstance(keys, str) else keys))
        if out is not None:
            check_container(out, "out")
            unwrap(out)._check_all_writable()
            made: Self = td._read_into(out)
            return made
        return td.clone() if td._state & ~LOCKED or index is None else td._resident()

    def _read_into(self, out: Any) -> Any:
        raise NotImplementedError

    def _read_pieces(self, batch: Any) -> list[Tensor]:
        raise NotImplementedError

    def _as_meta(self) -> Any:
        raise NotImplementedError


def require_container(found: Any) -> TensorDictBase:
    """Return what was loaded; raise `InvalidTypeError` if it is a value by itself, which no TensorDict can replace."""
    if isinstance(found, NonTensor):
        raise InvalidTypeError(
            f"what is stored there is a value by itself, {str(found.plain())[:100]!r}, and no TensorDict",
            hint="load it without `out=` and without a TensorDict that takes it over",
        )
    td: TensorDictBase = found
    return td


def _lock_stored(td: Any, handle: StoreHandle) -> None:
    """Lock a new dataset, on every backend alike: rows can be written, keys stay. Entries in memory stay unlocked."""
    if handle.store.caps._value_ & _KEPT:
        td.lock_()


def unlocked(saved: Any) -> Any:
    """Unlock the result of `save`. Methods that are named after a storage return a TensorDict whose keys can change."""
    if isinstance(saved, Future):
        return later(lambda: unlocked(saved.result()))
    saved.unlock_()
    saved._undo = "close"  # a `with` block closes it, and does not lock it again
    return saved


def refuse_new(mode: Mode, method: str) -> None:
    """Raise `OptionError` for a mode that creates a new dataset, when one is to be loaded."""
    if mode in ("w", "x"):
        raise OptionError(
            f"{method} reads a dataset, and mode {mode!r} would make a new, empty one in its place",
            hint="pass mode='r' or 'r+' to load; save() writes a dataset, and from_schema() allocates one",
        )


def absolute(location: Location, storage: Storage = None) -> Location:
    """Make a path absolute, because a thread may run in another working directory. Other locations stay."""
    text = os.fspath(location) if isinstance(location, os.PathLike) else location
    is_path = isinstance(location, os.PathLike) or storage in (None, DEFAULT_ON_DISK)
    return os.path.abspath(text) if is_path and isinstance(text, str) and "://" not in text else location


def later(run: Any) -> Future[Any]:
    """Run a function in a thread; the future holds the result or the error."""
    pool = ThreadPool(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future


def _groups_of(
    entries: Mapping[Path, SchemaEntry], values: Mapping[Path, Any], batch: torch.Size, device: str | None, names: Any
) -> dict[Path, Group]:
    keys: dict[Path, dict[str, None]] = {(): {}}
    for path in entries:
        for i in range(len(path)):
            keys.setdefault(path[:i], {})[path[i]] = None
    records: dict[Path, dict[str, Any]] = {}
    for path, record in values.items():
        records.setdefault(path[:-1], {})[path[-1]] = record
    return {
        path: Group(
            batch_size=tuple(map(int, batch)),
            names=names,
            device=device,
            keys=tuple(below),
            values=records.get(path, {}),
        )
        for path, below in sorted(keys.items(), key=lambda item: len(item[0]))
    }


def _in_memory(cls: Any, entries: Mapping[Path, SchemaEntry], batch: torch.Size, device: Any, names: Any) -> Any:
    td = cls({}, batch_size=batch, device=device, names=names)
    for path, entry in entries.items():
        td.set(path, in_memory_entry(path, entry, batch, device))
    return td
