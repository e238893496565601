"""The object layout: a store over any engine, made of immutable objects and one manifest that is put last."""

from tdstore.bytestore.directory import DIRECTORY_HINT
from tdstore.bytestore.opening import (
    BUILD_PLAN,
    open_directory,
    open_objects,
    refuse_foreign_files,
    unfinished_build,
)
from tdstore.bytestore.removal import remove_objects
from tdstore.bytestore.store import ByteStore

__all__ = [
    "BUILD_PLAN",
    "DIRECTORY_HINT",
    "ByteStore",
    "open_directory",
    "open_objects",
    "refuse_foreign_files",
    "remove_objects",
    "unfinished_build",
]
