"""Columns of image files, decoded as they are read."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.data import DecodeImages, Epochs, TensorDictDataset, encode_images
from tdstore.errors import (
    CorruptStoreError,
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
    MissingDependencyError,
    UnsupportedError,
)


def pixels(rows: int = 5, channels: int = 3, side: int = 8) -> torch.Tensor:
    ramp = torch.arange(rows * channels * side * side) % 251
    return ramp.reshape(rows, channels, side, side).to(torch.uint8)


def file_of(image: PIL.Image.Image, format: str = "PNG") -> bytes:
    data = io.BytesIO()
    image.save(data, format)
    return data.getvalue()


@pytest.mark.parametrize("place", ["x", "x.h5", "x.zarr"])
def test_batches_of_a_stored_column(tmp_path: Any, place: str) -> None:
    td = TensorDict({"next": {"image": encode_images(pixels(), "PNG")}, "label": torch.arange(5)}, [5])
    td.save(tmp_path / place).close()
    decode = DecodeImages(("next", "image"))
    batches = list(Epochs(tmp_path / place, 2, shuffle=False, transform=decode))
    assert torch.equal(torch.cat([batch["next", "image"] for batch in batches]), pixels())
    row = TensorDictDataset(tmp_path / place, transform=pickle.loads(pickle.dumps(decode)))[3]
    assert torch.equal(row["next", "image"], pixels()[3])
    assert row["label"] == 3


def test_windows_of_images() -> None:
    td = TensorDict({"image": encode_images(pixels(6), "PNG")}, [6])
    (batch,) = Epochs(td, 3, span=2, shuffle=False, transform=DecodeImages("image"))
    assert torch.equal(batch["image"], pixels(6).reshape(3, 2, 3, 8, 8))
    assert isinstance(td["image"][0], bytes)  # the batch is another TensorDict


@pytest.mark.parametrize(("format", "options"), [("JPEG", {"quality": 95}), ("WEBP", {"lossless": True}), ("PNG", {})])
def test_formats(format: str, options: dict[str, Any]) -> None:
    flat = torch.full((2, 3, 16, 16), 100, dtype=torch.uint8)
    found = DecodeImages("a")(TensorDict({"a": encode_images(flat, format, **options)}, [2]))["a"]
    assert (found.int() - 100).abs().max() <= 2


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 4)])
def test_modes(mode: str, channels: int) -> None:
    td = TensorDict({"a": encode_images(pixels(2, channels), "PNG")}, [2])
    assert torch.equal(DecodeImages("a", mode=mode)(td)["a"], pixels(2, channels))
    assert DecodeImages("a")(td)["a"].shape == (2, 3, 8, 8)


def test_sizes() -> None:
    files = [*encode_images(pixels(1, side=8), "PNG"), *encode_images(pixels(1, side=12), "PNG")]
    td = TensorDict({"a": files}, [2])
    with pytest.raises(MismatchError, match=r"'a' has images of several shapes .*\(3, 8, 8\), \(3, 12, 12\)"):
        DecodeImages("a")(td)
    assert DecodeImages("a", size=(4, 6))(td)["a"].shape == (2, 3, 4, 6)
    cut = DecodeImages("a", each=lambda image: image[:, :5, :7])(td)["a"]
    assert torch.equal(cut[0], pixels(1)[0, :, :5, :7])
    assert DecodeImages("a", size=(4, 6))(td[:0])["a"].shape == (0, 3, 4, 6)


def test_values_that_are_no_images() -> None:
    for file in (b"", b"GIF89a", file_of(PIL.Image.new("RGB", (2, 2)), "BMP"), encode_images(pixels(1))[0][:-20]):
        with pytest.raises(CorruptStoreError, match="row 1 of 'a' is no sound JPEG/PNG/WEBP image"):
            DecodeImages("a")(TensorDict({"a": [*encode_images(pixels(1)), file]}, [2]))
    deep = file_of(PIL.Image.fromarray(np.full((2, 2), 40000, np.uint16)))
    with pytest.raises(UnsupportedError, match="row 0 of 'a' is an image of mode I;16"):
        DecodeImages("a")(TensorDict({"a": [deep]}, [1]))
    with pytest.raises(InvalidTypeError, match="row 0 of 'a' holds str"):
        DecodeImages("a")(TensorDict({"a": ["x"]}, [1]))
    with pytest.raises(InvalidTypeError, match="'a' holds Tensor"):
        DecodeImages("a")(TensorDict({"a": torch.zeros(1)}, [1]))


def test_arguments() -> None:
    for wrong, message in (
        (lambda: DecodeImages(), "name the entries"),
        (lambda: DecodeImages("a", mode="CMYK"), "mode is one of"),
        (lambda: DecodeImages("a", size=(0, 3)), "size is"),
        (lambda: encode_images(pixels(), "BMP"), "format is one of"),
        (lambda: encode_images(pixels(2, 4)), "JPEG images are .* with 1, 3 channels"),
        (lambda: encode_images(pixels()[0]), "images are"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            wrong()
    with pytest.raises(InvalidTypeError, match="not torch.float32"):
        encode_images(torch.zeros(1, 3, 2, 2))


def test_pillow_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingDependencyError, match="images need Pillow"):
        DecodeImages("a")
    assert tdstore.data is not None


def test_what_is_wrong_with_a_file_or_an_argument_is_named(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    huge = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")
    for file, text in ((huge, "decompression bomb"), (b"text", "cannot identify image file")):
        with pytest.raises(CorruptStoreError, match=text) as caught:
            DecodeImages("image")(TensorDict({"image": [file]}, [1]))
        assert "0x" not in str(caught.value)
    for wrong in (4, "44", (4,), (4, 0)):
        with pytest.raises(InvalidArgumentError, match="size is"):
            DecodeImages("image", size=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="not a ndarray") as refused:
        encode_images(np.zeros((2, 3, 8, 8), np.uint8), "PNG")  # type: ignore[arg-type]
    assert "from_numpy" in str(refused.value.hint)
    for shape, hint in (((2, 8, 8), "unsqueeze"), ((2, 8, 8, 3), "permute"), ((2, 5, 8, 8), "None")):
        with pytest.raises(InvalidArgumentError) as told:
            encode_images(torch.zeros(shape, dtype=torch.uint8), "PNG")
        assert hint in str(told.value.hint)
