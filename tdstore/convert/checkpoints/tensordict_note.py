"""The structure that the `tensordict` package keeps in the metadata of a safetensors file, from release 0.15."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tdstore.container.core.container import Container
from tdstore.container.core.tensorclasses import PREFIX, lookup
from tdstore.container.entries.unbatched import UnbatchedTensor
from tdstore.container.functions.construct_and_join import lazy_stack
from tdstore.container.values.nontensor import NonTensorData
from tdstore.errors import CorruptStoreError, TDStoreError
from tdstore.header import Group
from tdstore.types import Path

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

NOTE = "tensordict"
"""The entry of the file's metadata."""
_VERSION = 1
_CLASS = re.compile(r"<class '(.+)'>")


def write_note(groups: Mapping[Path, Group], names: Mapping[Path, str]) -> str | None:
    """Return the note that lets `tensordict` read the batch sizes, names and plain values of a file.

    Objects of tensorclasses are TensorDicts there. Values per row, which it cannot store, are left out.

    Args:
        groups: the nested TensorDicts.
        names: the names of the tensors in the file.

    Returns:
        None, if there are lazy stacks: it stores their tensors in another way.
    """
    if any(group.kind != "TensorDict" and not group.kind.startswith(PREFIX) for group in groups.values()):
        return None
    return json.dumps({"version": _VERSION, "root": _node(groups, names, ())})


def _node(groups: Mapping[Path, Group], names: Mapping[Path, str], path: Path) -> dict[str, Any]:
    group = groups[path]
    keys: dict[str, Any] = {}
    for key in group.keys:
        here = (*path, key)
        record = group.values.get(key, {})
        if here in groups:
            keys[key] = {"td": _node(groups, names, here)}
        elif here in names:
            keys[key] = {"tensor": names[here]}
        elif "unbatched" in record:
            keys[key] = {"tensor": names[(*here, "data")], "unbatched": True}
        elif record.keys() == {"data"} and isinstance(record["data"], (str, int, float, bool, type(None))):
            keys[key] = {"non_tensor": record["data"]}
    return {"batch_size": list(group.batch_size or ()), "names": group.names and list(group.names), "keys": keys}


def read_note(note: str, tensors: Mapping[str, Tensor], url: str) -> TensorDictBase:
    """Build what `tensordict` wrote. A tensorclass that is not declared in this process comes as a TensorDict.

    Raises:
        CorruptStoreError: the note does not fit the tensors.
    """
    try:
        plain = json.loads(note)
        if plain["version"] == _VERSION:
            built: TensorDictBase = _built(plain["root"], tensors)
            return built
        problem = f"it has the version {plain['version']!r}, and {_VERSION} is known"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, TDStoreError) as error:
        problem = repr(error)
    raise CorruptStoreError(f"{url}: the description by tensordict does not fit its tensors: {problem}", url=url)


def _built(node: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    td: Any = Container._resident_class(batch_size=node["batch_size"], names=node["names"])
    for key, entry in node["keys"].items():
        if "td" in entry:
            value = _built(entry["td"], tensors)
        elif "tensor" in entry:
            value = tensors[entry["tensor"]]
            value = UnbatchedTensor(value) if entry.get("unbatched") else value
        else:
            value = NonTensorData(entry["non_tensor"], td.batch_size)
        td.set((key,), value)
    if "stack_dim" in node:
        return lazy_stack(list(td.unbind(node["stack_dim"])), node["stack_dim"])
    found = _CLASS.fullmatch(node.get("class", ""))
    cls = lookup(found[1]) if found else None
    return td if cls is None else cls._wrap_if_fits(td)
