"""Images that are stored as the bytes of their files, decoded as they are read."""

import io
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tdstore import TensorDictBase
from tdstore.errors import CorruptStoreError, InvalidArgumentError, InvalidTypeError, MismatchError, UnsupportedError
from tdstore.types import NestedKey

from .pillow import CHANNELS, FORMATS, load_pillow


class DecodeImages:
    """Decode columns of JPEG, PNG or WebP files, as a `transform` of `Epochs` or `TensorDictDataset`.

    Each named entry holds the bytes of one file per row, and becomes a uint8 tensor of shape
    `[*batch_size, channels, height, width]`. Other entries stay as they are. Pillow decodes; other formats are refused.

    Args:
        *keys: the entries.
        mode: "RGB", "L" (one channel of grey) or "RGBA"; images of other modes are converted.
        size: (height, width) that all images are resized to. Default: their own, which must be equal in a batch.
        each: a function of one image, `[channels, height, width]`, called after `size`, such as a random crop.

    Raises:
        InvalidArgumentError: no keys, an unknown mode, or a size that is not two positive numbers.
        MissingDependencyError: Pillow is not installed.

    Example:
        >>> from tdstore.data import DecodeImages, Epochs, encode_images
        >>> pixels = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
        >>> td = tdstore.TensorDict({"image": encode_images(pixels, "PNG"), "label": torch.arange(6)}, [6])
        >>> td.save("images.h5").close()
        >>> batch = next(iter(Epochs("images.h5", 4, shuffle=False, transform=DecodeImages("image"))))
        >>> batch["image"].shape, bool((batch["image"] == pixels[:4]).all())
        (torch.Size([4, 3, 8, 8]), True)
    """

    def __init__(
        self,
        *keys: NestedKey,
        mode: str = "RGB",
        size: tuple[int, int] | None = None,
        each: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if not keys:
            raise InvalidArgumentError("name the entries that hold images")
        if mode not in CHANNELS:
            raise InvalidArgumentError(f"mode is one of {', '.join(CHANNELS)}, not {mode!r}")
        if size is not None:
            pair = isinstance(size, (tuple, list)) and len(size) == 2
            if not pair or not all(type(n) is int and n > 0 for n in size):
                raise InvalidArgumentError(f"size is (height, width), not {size!r}")
        self.keys, self.mode, self.size, self.each = keys, mode, size, each
        load_pillow()

    def __repr__(self) -> str:
        return f"DecodeImages({', '.join(map(repr, self.keys))}, mode={self.mode!r}, size={self.size})"

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return a batch with its images decoded.

        Args:
            batch: rows, or one row.

        Raises:
            CorruptStoreError: a value is not an image of a known format, or has more pixels than Pillow decodes.
            InvalidTypeError: an entry does not hold bytes. MismatchError: images of several sizes.
            UnsupportedError: more than 8 bits per channel.
        """
        decoded = batch.clone(recurse=False)
        flat = batch.reshape(-1) if batch.batch_dims > 1 else batch
        for key in self.keys:
            values = flat[key]
            files = [values] if isinstance(values, bytes) else values
            images = self._stacked(key, files)
            decoded.set(key, images.reshape(*batch.batch_size, *images.shape[1:]))
        return decoded

    def _stacked(self, key: NestedKey, files: Any) -> Tensor:
        if isinstance(files, Tensor | TensorDictBase):
            raise InvalidTypeError(f"{key!r} holds {type(files).__name__}, not the bytes of image files")
        images = [self._decoded(key, row, file) for row, file in enumerate(cast(Sequence[object], files))]
        shapes = {tuple(image.shape) for image in images}
        if len(shapes) > 1:
            raise MismatchError(
                f"{key!r} has images of several shapes in one batch: {', '.join(map(str, sorted(shapes)[:4]))}",
                hint="pass size=(height, width), or each= with a function that crops",
            )
        if not images:
            return torch.zeros(0, CHANNELS[self.mode], *(self.size or (0, 0)), dtype=torch.uint8, device="cpu")
        return torch.stack(images)

    def _decoded(self, key: NestedKey, row: int, file: object) -> Tensor:
        if not isinstance(file, bytes):
            raise InvalidTypeError(f"row {row} of {key!r} holds {type(file).__name__}, not the bytes of an image file")
        pillow = load_pillow()
        try:
            with pillow.open(io.BytesIO(file), formats=FORMATS) as image:
                if image.mode[0] in "IF":  # Pillow would cut its values off
                    raise UnsupportedError(f"row {row} of {key!r} is an image of mode {image.mode}, not of 8 bits")
                found = image.convert(self.mode)
        except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:  # of damaged files
            why = str(error).partition(" <")[0]  # without the address of the file object
            raise CorruptStoreError(f"row {row} of {key!r} is no sound {'/'.join(FORMATS)} image: {why}") from error
        if self.size is not None:
            found = found.resize((self.size[1], self.size[0]), pillow.Resampling.BILINEAR, reducing_gap=2.0)
        pixels = torch.from_numpy(np.array(found))
        pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
        return pixels if self.each is None else self.each(pixels)
