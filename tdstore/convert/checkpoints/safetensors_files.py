"""From and to safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tdstore.arguments import check_path, check_separator
from tdstore.container.core.container import Container
from tdstore.container.functions.construct_and_join import from_dict
from tdstore.container.storage.describe import describe
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import over
from tdstore.convert import packages
from tdstore.convert.checkpoints.tensordict_note import NOTE, read_note, write_note
from tdstore.convert.replaced_files import replacing
from tdstore.errors import CorruptStoreError, InvalidArgumentError, UnsupportedError
from tdstore.header import Header, header_from_builtins, header_to_builtins
from tdstore.io.opening import open_store
from tdstore.keys import join
from tdstore.types import DeviceLike, LeafSpec, Path, SizeLike, Write, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

_RESERVED = "__metadata__"
HEADER = "tdstore"
"""The entry of the file's metadata that holds the header and the path of each tensor."""


def to_safetensors(
    td: Container, path: str | os.PathLike[str], separator: str, metadata: Mapping[str, str] | None
) -> None:
    """See `TensorDict.to_safetensors`."""
    check_path(path, "path")
    groups, specs = describe(td)
    tensors: dict[str, Tensor] = {}
    paths: dict[str, Path] = {}
    values = td._read_pieces([(leaf, ()) for leaf in specs])
    for leaf, value in zip(specs, values, strict=True):
        name = join(leaf, separator)
        if name in tensors:
            raise InvalidArgumentError(f"two entries would be called {name!r}: choose another separator")
        if name == _RESERVED:
            raise InvalidArgumentError(f"no tensor of a safetensors file can be called {name!r}: rename the entry")
        tensors[name], paths[name] = value, leaf
    note = json.dumps({"leaves": paths, **header_to_builtins(Header(groups))})
    notes = {**(metadata or {}), HEADER: note}
    if (of_tensordict := write_note(groups, {leaf: name for name, leaf in paths.items()})) is not None:
        notes[NOTE] = of_tensordict
    try:
        with replacing(path) as place:
            packages.safetensors().torch.save_file(_unshared(tensors), place, notes)
    except KeyError as error:  # a dtype that is not in its table
        lost = [leaf for name, leaf in paths.items() if tensors[name].dtype == error.args[0]]
        if not lost:
            raise
        raise UnsupportedError(
            f"entry {path_text(lost[0])}: a safetensors file holds no {error.args[0]}",
            hint="cast it, or torch.view_as_real() makes two numbers of a complex one",
        ) from None


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors without shared memory, since the format has no views."""
    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        place = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return out


def from_safetensors(
    path: str | os.PathLike[str],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: SizeLike | None = None,
    separator: str | None = ".",
) -> TensorDictBase:
    """Make a TensorDict from a `.safetensors` file.

    A file of `to_safetensors`, also of the `tensordict` package's, gives the same batch sizes, names and values, unless
    `batch_size` or `auto_batch_size` is passed. Of other files the names of the tensors become keys.

    Args:
        path: the file.
        auto_batch_size: whether each level gets the largest batch size that its entries share.
        batch_dims: with `auto_batch_size`, the largest number of batch dimensions.
        device: the device of the tensors; default: the CPU.
        batch_size: the batch size; default: that of the written TensorDict, else `[]`.
        separator: splits the names of tensors of other writers into nested keys; None splits nothing.

    Raises:
        FileNotFoundError: there is no file. CorruptStoreError: the file is truncated, or its description does not fit
            its tensors.

    Example:
        >>> TensorDict({"a": torch.zeros(2), "n": {"b": torch.ones(2)}}, [2]).to_safetensors("t.safetensors")
        >>> from_safetensors("t.safetensors")["n"].batch_size
        torch.Size([2])
    """
    check_path(path, "path")
    if separator is not None:
        check_separator(separator)
    reader = packages.safetensors()
    try:
        with reader.safe_open(path, "pt", device=str(device or "cpu")) as file:
            notes = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except reader.SafetensorError as error:
        raise CorruptStoreError(
            f"{path} is no whole safetensors file: {error}", url=str(path), hint="write it again"
        ) from error
    if (HEADER in notes or NOTE in notes) and batch_size is None and not auto_batch_size:
        restored: TensorDictBase = (
            _restored(notes[HEADER], tensors, str(path))
            if HEADER in notes
            else read_note(notes[NOTE], tensors, str(path))
        )
        return restored if device is None else restored.to(device)
    cls = Container._resident_class
    td: Any = from_dict(cls, tensors, None, False, None, device, None)
    td = td if separator is None else td.unflatten_keys(separator)
    if batch_size is None and not auto_batch_size:
        found: TensorDictBase = td
        return found
    return from_dict(cls, td, batch_size, auto_batch_size, batch_dims, device, None)


def _restored(note: str, tensors: dict[str, Tensor], url: str) -> Any:
    """Rebuild the written TensorDict from its leaves and header."""
    try:
        plain = json.loads(note)
        paths = {name: tuple(map(str, plain["leaves"][name])) for name in tensors}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptStoreError(f"{url}: its description does not fit its tensors: {error!r}", url=url) from None
    header = header_from_builtins(plain, url=url)
    store, backend = open_store(None, storage="memory", mode="w")
    for name, path in paths.items():
        tensor = tensors.pop(name)
        store.create({path: LeafSpec(tensor.shape, tensor.dtype)})
        store.write([Write(path, (), tensor.cpu())])
    store.save_header(header)
    return over(StoreHandle(store, backend, None, "w", {}))
