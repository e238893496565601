"""Arguments that functions on locations cannot take: an error of ours that names the argument, and no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import InvalidArgumentError, InvalidTypeError, OptionError, TDStoreError

CALLS: dict[str, tuple[Callable[[str, Path], Any], type[TDStoreError], str]] = {
    "a copy to nowhere": (
        lambda p, f: tdstore.copy(p, None),
        InvalidTypeError,
        "dst must be a path or a URL, not None",
    ),
    "blocks": (lambda p, f: tdstore.copy(p, f / "n", block_bytes="x"), InvalidTypeError, "block_bytes must be an int"),
    "no number of seconds": (
        lambda p, f: tdstore.copy(p, f / "n", checkpoint=float("nan")),
        OptionError,
        "checkpoint is a number of seconds, not nan",
    ),
    "seconds": (lambda p, f: tdstore.copy(p, f / "n", checkpoint="x"), OptionError, "checkpoint is a number of sec"),
    "a name with a NUL": (lambda p, f: tdstore.verify("a\0b"), InvalidArgumentError, "location must be a path, not 'a"),
    "no locations": (lambda p, f: tdstore.concat(None), InvalidTypeError, "must be a list of locations, not None"),
    "a number of locations": (lambda p, f: tdstore.concat(3), InvalidTypeError, "a list of locations, not an int"),
    "versions to keep": (lambda p, f: tdstore.prune(p, keep="x"), InvalidTypeError, "keep must be an int, not a str"),
    "half a version": (lambda p, f: tdstore.prune(p, keep=1.5), InvalidTypeError, "keep must be an int, not a float"),
    "ages": (lambda p, f: tdstore.prune(p, older_than=[]), InvalidTypeError, "older_than must be a number of seconds"),
    "a version": (lambda p, f: tdstore.tag(p, "x", version=[]), InvalidTypeError, "version must be the id of a vers"),
    "a file of tensors": (lambda p, f: data().to_safetensors(3), InvalidTypeError, "path must be a path, not an int"),
    "a table": (lambda p, f: data().to_parquet("a\0b"), InvalidArgumentError, "path must be a path, not 'a"),
}


def data() -> TensorDict:
    return TensorDict({"a": torch.ones(3)}, [3])


@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_the_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    place = f"file://{tmp_path}/place"
    td = data().save(place)
    td.commit(message="first").close()
    before = sorted(tmp_path.rglob("*"))
    call, kind, text = CALLS[name]
    with pytest.raises(kind, match=text):
        call(place, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert tdstore.open(place)["a"].tolist() == [1, 1, 1]
