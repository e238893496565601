"""Rows as shards of MosaicML's streaming format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tdstore.arguments import refuse_type
from tdstore.container.core.container import Container
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.convert import packages
from tdstore.convert.tables.row_blocks import TEXT_BLOCK, row_blocks, with_rows
from tdstore.errors import UnsupportedError

SEPARATOR = "."
_ENCODINGS: dict[type, str] = {str: "str", bytes: "bytes", int: "int", bool: "int", float: "float64"}


def write(
    td: Container, columns: dict[str, str] | None, writer: Any, finish: bool | None, options: dict[str, Any]
) -> None:
    """See `TensorDict.to_mds`."""
    kind: Any = packages.mds_writer() if writer is None else None
    td = with_rows(td, "a dataset of samples")
    columns = columns or _columns(td[:1]._resident())
    if writer is not None:
        if not hasattr(writer, "write"):
            raise refuse_type("writer", "an MDSWriter", writer)
        _write_rows(td, columns, writer)
        if finish:
            writer.finish()
        return
    with kind(columns=columns, **options) as made:
        _write_rows(td, columns, made)


def _write_rows(td: Any, columns: dict[str, str], writer: Any) -> None:
    for _, _, block in row_blocks(td, TEXT_BLOCK):
        entries = dict(_flat(block, ""))
        for row in range(block.batch_size[0]):
            writer.write({name: _cell(entries[name], row) for name in columns})


def _flat(td: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in td._resident().items():
        if isinstance(value, Container):
            yield from _flat(value, f"{prefix}{key}{SEPARATOR}")
        else:
            yield prefix + key, value


def _cell(value: Any, row: int) -> Any:
    if isinstance(value, NonTensor):
        return value.data if isinstance(value, NonTensorData) else value[row].plain()
    cell = value[row]
    return cell.detach().cpu().numpy() if cell.ndim else cell.item()


def _columns(row: Any) -> dict[str, str]:
    """Infer the encoding of each entry from one row."""
    out: dict[str, str] = {}
    for name, value in _flat(row, ""):
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            sizes = ",".join(map(str, value.shape[1:]))
            out[name] = f"ndarray:{dtype}:{sizes}" if sizes else "int" if dtype == "bool" else dtype
        else:
            kind = type(_cell(value, 0))
            if kind not in _ENCODINGS:
                raise UnsupportedError(
                    f"the entry {name!r} holds a {kind.__name__}, for which mds has no encoding",
                    hint="exclude it, or pass columns= with one of mds's own",
                )
            out[name] = _ENCODINGS[kind]
    return out
