"""Pillow, loaded on first use."""

from types import ModuleType

from tdstore.errors import MissingDependencyError

FORMATS = ("JPEG", "PNG", "WEBP")
CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}


def load_pillow() -> ModuleType:
    """Import `PIL.Image`.

    Raises:
        MissingDependencyError: Pillow is not installed.
    """
    try:
        import PIL.Image
    except ImportError as error:
        raise MissingDependencyError("images need Pillow", hint="pip install pillow") from error
    return PIL.Image
