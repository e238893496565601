"""The object layout: a whole store over any engine, as immutable objects and one manifest that is put last."""

from tdstore.bytestore.store import DIRECTORY_HINT, ByteStore, open_directory, open_objects

__all__ = ["DIRECTORY_HINT", "ByteStore", "open_directory", "open_objects"]
