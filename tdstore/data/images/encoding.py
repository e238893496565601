"""Tensors as the bytes of image files, one per row."""

import io
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from tdstore.errors import InvalidArgumentError, InvalidTypeError

from .pillow import CHANNELS, FORMATS, load_pillow


def encode_images(images: Tensor, format: str = "JPEG", **options: Any) -> list[bytes]:
    """Encode a batch of images, as a column of values for a TensorDict.

    Args:
        images: `[rows, channels, height, width]`, uint8, of one, three or four channels.
        format: "JPEG", "PNG" or "WEBP". JPEG, and WebP without `lossless=True`, lose detail.
        **options: of Pillow's encoder, such as `quality=90`.

    Returns:
        the bytes of a file for each row.

    Raises:
        InvalidArgumentError: an unknown format, or other shapes; JPEG has no alpha channel.
        InvalidTypeError: not a uint8 tensor. MissingDependencyError: Pillow is not installed.

    Example:
        >>> from tdstore.data import encode_images
        >>> files = encode_images(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "PNG")
        >>> len(files), files[0][:4]
        (2, b'\\x89PNG')
    """
    if format not in FORMATS:
        raise InvalidArgumentError(f"format is one of {', '.join(FORMATS)}, not {format!r}")
    if not isinstance(images, Tensor):
        raise InvalidTypeError(
            f"images are a uint8 tensor, not a {type(images).__name__}", hint="torch.from_numpy() makes one of an array"
        )
    if images.dtype is not torch.uint8:
        raise InvalidTypeError(f"images are a uint8 tensor, not {images.dtype}")
    modes = {channels: mode for mode, channels in CHANNELS.items() if format != "JPEG" or mode != "RGBA"}
    if images.ndim != 4 or images.shape[1] not in modes:
        raise InvalidArgumentError(
            f"{format} images are [rows, channels, height, width] with {', '.join(map(str, sorted(modes)))} channels, "
            f"not {list(images.shape)}",
            hint=_hint(images, modes),
        )
    pillow = load_pillow()
    files = []
    for pixels in images.permute(0, 2, 3, 1).cpu().numpy():
        file = io.BytesIO()
        pillow.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, format, **options)
        files.append(file.getvalue())
    return files


def _hint(images: Tensor, channels: Collection[int]) -> str | None:
    if images.ndim == 3:
        return "images.unsqueeze(1) has one channel, and images[None] is one row"
    if images.ndim == 4 and images.shape[-1] in channels:
        return "images.permute(0, 3, 1, 2), if the channels come last"
    return None
