"""Images as the bytes of their files, one per row: decoded on the way to training, and encoded."""

from .decoding import DecodeImages
from .encoding import encode_images

__all__ = ["DecodeImages", "encode_images"]
