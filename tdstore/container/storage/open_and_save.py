"""From an open store to a container, and from a container to a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdstore.arguments import as_device
from tdstore.container.core.container import GROUP, VALUE, Container
from tdstore.container.core.locks import BOUND, MAPPED, READONLY, SHARED, THROUGH
from tdstore.container.core.tensorclasses import rewrap, unwrap_all, wrap
from tdstore.container.storage.describe import STACK_KIND, describe
from tdstore.container.storage.entry_kinds import Leaf, NestedTensor, SubGroup
from tdstore.container.storage.handle import MANY, StoreHandle
from tdstore.errors import CorruptStoreError, KeyNotFoundError, NotAGroupError, OptionError
from tdstore.header import VALUE_KEY, VALUE_KIND, Group, Header, without_collection
from tdstore.index.tracing import fake_mode
from tdstore.io.blocks import BLOCK_BYTES, leaf_batches
from tdstore.io.opening import PLAIN, Location, Storage, find_backend, locate, open_backend
from tdstore.io.progress import Progress
from tdstore.io.versions import PINS, pinned
from tdstore.keys import unravel
from tdstore.store import Cap, Store
from tdstore.types import DeviceLike, LeafSpec, Mode, Path, StoreIndex, Write, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase


_NBYTES = attrgetter("nbytes")
_CPU = torch.device("cpu")
_AS_IS = nullcontext()
_VIEW, _PERSISTENT, _SHARED = Cap.VIEW.value, Cap.PERSISTENT.value, Cap.SHARED.value
Viewer = Callable[[Path], Tensor]


def over(handle: StoreHandle, path: Path = (), flags: int = 0) -> TensorDictBase:
    """Build the container over an open store: of live tensors where the store can give them.

    `flags` are added to those that say what the store is, for tensors that other processes could see.
    """
    if path not in handle.groups:
        raise KeyNotFoundError(f"no TensorDict {path_text(path)} in {handle.store.url}")
    store = handle.store
    caps = store.caps._value_
    if not caps & _VIEW:
        return stored(handle, path)
    if caps & (_PERSISTENT | _SHARED):
        flags |= BOUND | (MAPPED if caps & _PERSISTENT else SHARED) | (0 if store.writable else READONLY)
    else:
        flags = 0  # tensors of this process: nothing can open the store again
    if len(handle.specs) < MANY:
        return _resident(handle, path, flags)
    with without_collection():
        return _resident(handle, path, flags)


def stored(handle: StoreHandle, path: Path, device: torch.device | None = None) -> TensorDictBase:
    """Build the container over a group of a store whose leaves are not live tensors."""
    if handle.groups[path].kind == STACK_KIND:
        made: TensorDictBase = _stack(handle, path, 0, lambda below: stored(handle, below, device))
        return made
    found: TensorDictBase = wrap(handle, path, Container._stored_class._over(handle, path, device=device))
    return found


def _stack(handle: StoreHandle, path: Path, flags: int, element: Callable[[Path], Any]) -> TensorDictBase:
    """Build the lazy stack that a group is. `element` makes its elements."""
    extra = handle.groups[path].extra
    dim: Any
    dim, count, name, empty_batch_size = (extra.get(k) for k in ("stack_dim", "count", "name", "batch_size"))
    if count is None:  # another writer's
        count = len(handle.groups[path].keys)
    paths = [(*path, str(i)) for i in range(count)] if isinstance(count, int) and count <= len(handle.groups) else []
    lost = [p for p in paths if handle.kind(p) != GROUP]
    made = [] if lost else [element(p) for p in paths]
    sound = empty_batch_size is None or (
        isinstance(empty_batch_size, list) and all(type(n) is int and 0 <= n < 2**62 for n in empty_batch_size)
    )
    ndims = {len(td.batch_size) for td in made} or {len(empty_batch_size or ()) if sound else -1}
    sound = sound and isinstance(name, (str, type(None)))
    sound = sound and isinstance(dim, int) and len(ndims) == 1 and 0 <= dim <= min(ndims)
    if lost or not sound or len(paths) != count:
        raise CorruptStoreError(
            f"the lazy stack {path_text(path)} of {handle.store.url} is not what its header says: {str(extra)[:200]}",
            url=handle.store.url,
        )
    cls, bare = unwrap_all(made)
    td: Any = rewrap(cls, Container._stack_class._of(bare, dim, name, empty_batch_size or ()))
    above = handle.groups[path[:-1]] if path else None
    lead = tuple(above.batch_size or ()) if above is not None and above.kind != STACK_KIND else ()
    if tuple(td.batch_size[: len(lead)]) != lead:
        raise CorruptStoreError(
            f"the lazy stack {path_text(path)} of {handle.store.url} has the batch size {list(td.batch_size)}, "
            f"which does not start with that of its parent, {list(lead)}",
            url=handle.store.url,
        )
    td._state, td._binding = flags, (handle, path) if flags or Cap.VIEW not in handle.store.caps else None
    stack: TensorDictBase = td
    return stack


def _resident(handle: StoreHandle, path: Path, flags: int, view: Viewer | None = None) -> TensorDictBase:
    group = handle.groups[path]
    if view is None:
        view = _shapes_alone(handle) if fake_mode() else handle.store.view
    if group.kind == STACK_KIND:
        made: TensorDictBase = _stack(handle, path, flags, lambda below: _resident(handle, below, flags, view))
        return made
    data: dict[str, Any] = {}
    entries = handle.entries
    for key in group.keys:
        at = (*path, key)
        data[key] = view(at) if type(entries[at]) is Leaf else entry(handle, at, flags, view)
    # What is mapped is on the CPU, whatever was told of where it came from.
    device = _CPU if flags & MAPPED else None if group.device is None else _device_of(handle.store)
    td = Container._resident_class._new(data, torch.Size(group.batch_size or ()), device, group.names, flags)
    td._binding = (handle, path) if flags else None
    found: TensorDictBase = td if group.kind == "TensorDict" else wrap(handle, path, td)
    return found


def entry(handle: StoreHandle, path: Path, flags: int, view: Viewer | None = None) -> Any:
    """Build one entry of a resident store as its TensorDict holds it."""
    match handle.entries[path]:
        case Leaf():
            return (view or handle.store.view)(path)
        case NestedTensor(_, layout):
            return layout.viewed(handle.store)
        case SubGroup():
            return _resident(handle, path, flags, view)
    return handle.value(path)


def _shapes_alone(handle: StoreHandle) -> Viewer:
    # Under FakeTensorMode a leaf has a shape and a dtype, and no file is mapped.
    return lambda path: torch.empty(handle.specs[path].shape, dtype=handle.specs[path].dtype, device="cpu")


def _device_of(store: Store) -> torch.device:
    return torch.device(getattr(store, "device", "cpu") if Cap.DIRECT_DEVICE in store.caps else "cpu")


def _check_device(store: Store, wanted: Any) -> None:
    if Cap.VIEW in store.caps and wanted is not None and as_device(wanted).type != _device_of(store).type:
        raise OptionError(
            f"{store.url}: entries are on {_device_of(store)}, where they are stored, and not on {wanted}",
            url=store.url,
            hint="leave out device=, and td.to(device) copies them there",
        )


def _subpath(subpath: Any, handle: StoreHandle) -> Path:
    """Return the path of a group from a key, or from a string of names with slashes between them."""
    path = unravel(subpath) if not isinstance(subpath, str) else (subpath,)
    if handle.kind(path) != GROUP and isinstance(subpath, str):
        path = tuple(subpath.split("/"))
    if handle.kind(path) != GROUP:
        handle.close()
        raise NotAGroupError(f"no TensorDict {path_text(path)} in {handle.store.url}")
    return path


def open_container(
    location: Location = None, *, storage: Storage = None, mode: Mode = "r", subpath: Any = None, **options: Any
) -> TensorDictBase:
    """Open what is stored at a location. See `tdstore.open`."""
    if type(location) not in PLAIN:
        location, options = locate(location, options)
    if not PINS.isdisjoint(options):
        options = pinned(location, storage, mode, options)
    with torch.utils._python_dispatch._disable_current_modes() if fake_mode() else _AS_IS:  # stores take real tensors
        handle = StoreHandle.open(location, storage=storage, mode=mode, **options)
    if mode in ("w", "x", "a") and not handle.store.load_header():
        handle.commit(handle.groups)
    path = () if subpath is None else _subpath(subpath, handle)
    td = over(handle, path, THROUGH if handle.store.writable else 0)
    td._undo = "close"
    return value_by_itself(td, handle) if handle.groups[path].kind == VALUE_KIND else td


def value_by_itself(td: Any, handle: StoreHandle) -> TensorDictBase:
    """Return the value that a stored TensorDict is the form of, read into memory; the dataset is closed.

    Raises:
        CorruptStoreError: there is none.
    """
    if handle.kind((VALUE_KEY,)) != VALUE:
        handle.close()
        raise CorruptStoreError(f"{handle.store.url} is to hold one value, and holds none", url=handle.store.url)
    value: TensorDictBase = td.get(VALUE_KEY).clone()  # annotated as all that opens
    handle.close()
    return value


def allocate(
    groups: Mapping[Path, Group],
    specs: Mapping[Path, LeafSpec],
    location: Location,
    storage: Storage,
    mode: Mode,
    options: dict[str, Any],
    writes: Sequence[Write] = (),
    device: DeviceLike | None = None,
) -> StoreHandle:
    """Create a store with a header and leaves that read as their fill value but for `writes`; all or nothing.

    Raises:
        OptionError: its leaves are live tensors, and not on that `device`.
    """
    if type(location) not in PLAIN:
        location, options = locate(location, options)
    backend, text = find_backend(location, storage, mode)
    store = open_backend(backend, text, mode, options)
    try:
        _check_device(store, device)
        store.create(specs)
        if writes:
            store.write(writes)
        store.save_header(Header(groups))
        return StoreHandle(store, backend, text, mode, options, saved=(groups, specs))
    except BaseException:
        store.close()
        raise


def write(
    td: Any, location: Location, storage: Storage, mode: Mode, options: dict[str, Any], progress: bool = False
) -> StoreHandle:
    """Save a container as a new dataset: wholly there, or the old one untouched."""
    payloads: dict[Path, Tensor] = {}
    bar: Progress | None = None
    groups, specs = describe(td, payloads=payloads)
    for key, chosen in (options.pop("leaf_options", None) or {}).items():
        leaf = unravel(key)
        if leaf not in specs:
            raise KeyNotFoundError(f"leaf_options name {path_text(leaf)}, which is not a tensor of what is saved")
        specs[leaf] = specs[leaf].replace(**chosen)
    if type(location) not in PLAIN:
        location, options = locate(location, options)
    backend, text = find_backend(location, storage, mode)
    store = open_backend(backend, text, mode, options)
    try:
        store.create(specs)
        limit = BLOCK_BYTES
        if Cap.PARTIAL_WRITE not in store.caps:
            limit = max([limit, *(s.nbytes for s in specs.values())])
        if progress:
            bar = Progress(sum(map(_NBYTES, specs.values())), "save")
        for batch in leaf_batches(specs, limit):
            if payloads:
                rest = iter(td._read_pieces([piece for piece in batch if piece[0] not in payloads]))
                values = [_piece(payloads[path], index) if path in payloads else next(rest) for path, index in batch]
            else:
                values = td._read_pieces(batch)
            writes = []
            for (path, index), value in zip(batch, values, strict=True):
                writes.append(Write(path, index, value))
            store.write(writes)
            if bar is not None:
                bar.advance(sum(map(_NBYTES, values)))
        store.save_header(Header(groups))
        return StoreHandle(store, backend, text, mode, options, saved=(groups, specs))
    except BaseException:
        store.close()
        raise
    finally:
        if bar is not None:
            bar.close()


def _piece(leaf: Tensor, index: StoreIndex) -> Tensor:
    """Return a part of a leaf that `describe` made of a value."""
    return (leaf[index] if index else leaf).detach().cpu()
