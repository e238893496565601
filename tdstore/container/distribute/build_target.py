"""Where a build ends: the object layout at a URL itself, or another format, which the finished rows are copied to."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING, Any

from tdstore.bytestore import BUILD_PLAN, open_objects
from tdstore.bytestore.manifest import decode_objects
from tdstore.container.distribute.part_values import BACKEND
from tdstore.container.distribute.parts import PARTS
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.storage.open_and_save import open_container, stored
from tdstore.engine import Engine
from tdstore.errors import InvalidArgumentError, StoreError, StoreNotFoundError
from tdstore.io.housekeeping import exists
from tdstore.io.opening import BUILD_SUFFIX, find_backend
from tdstore.registry import registry
from tdstore.storekit import refusals
from tdstore.storekit.documents import MAX_FILE_BYTES, NAME
from tdstore.storekit.local_engine import LocalEngine

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

PLAN = BUILD_PLAN
_COPYING = PARTS + "copying.json"
"""There from before the first byte of a copy: what is at the location then was written by this build."""


class Target:
    """The location of a build, and the place of its objects until the end.

    Args:
        location: a URL or path.
        storage: name of the backend; None: found from the location.
        storage_options: credentials and settings of the URL.
        save_options: of the backend that is copied to.

    Raises:
        InvalidArgumentError: `save_options` where nothing is copied.
    """

    def __init__(
        self, location: str, storage: str | None, storage_options: dict[str, Any], save_options: dict[str, Any]
    ) -> None:
        path = location.rstrip("/") if len(location) > 1 else location
        self.location = path if "://" in path else os.path.abspath(path)
        self.storage = storage
        self.staged = not _is_object_layout(self.location, storage)
        self.stage = self.location + BUILD_SUFFIX if self.staged else self.location
        """The place of the objects."""
        self.options: dict[str, Any] = {"storage_options": storage_options} if storage_options else {}
        self.save_options = save_options
        if save_options and not self.staged:
            raise InvalidArgumentError(
                f"save_options= are for rows that are copied to another format; {location} is of the object layout",
                hint="give storage= or another suffix, or leave them out",
            )

    def check_free(self) -> None:
        """Raise `StoreExistsError` where something is at the location."""
        if "://" not in self.location:
            occupied = os.path.lexists(self.location)
        else:
            occupied = self.staged and exists(self.location, storage=self.storage, **self.options)
        if occupied:
            raise refusals.place_exists(self.location)

    def begin(self, engine: Engine, plan: bytes) -> None:
        """Put the plan of a new build.

        Raises:
            StoreExistsError: something is at the location.
        """
        self.check_free()
        engine.delete([_COPYING])  # of an earlier build that ended in its last step
        engine.put(PLAN, plan)

    def is_there(self, engine: Engine) -> bool:
        """Check whether an earlier call has copied all rows, and ended before it had removed the objects."""
        if not self.staged or read_object(engine, _COPYING) is None:
            return False
        try:
            self.opened().close()
        except StoreError:
            return False
        return True

    def copy(self, engine: Engine) -> None:
        """Copy the rows to the location; a save is all or nothing."""
        if not self.staged:
            return
        again = read_object(engine, _COPYING) is not None
        if not again:
            self.check_free()
            engine.put(_COPYING, b"{}")
        source = stored(StoreHandle(open_objects(engine, close_engine=False), BACKEND, None, "r", {}), ())
        mode: Any = "w" if again else "x"
        saved = source.save(self.location, storage=self.storage, mode=mode, **self.options, **self.save_options)
        saved.close()

    def sweep(self, engine: Engine) -> None:
        """Remove what the build needed; the plan after the rest, so that a kill changes nothing."""
        used = set()
        if self.staged:
            engine.delete([NAME])
        else:
            manifest = decode_objects(bytes(engine.get(NAME, MAX_FILE_BYTES).data), url=self.stage)
            used = {record.name for record in manifest.objects}
        engine.delete([entry.key for entry in engine.list("data/") if entry.key not in used])
        engine.delete([entry.key for entry in engine.list(PARTS) if entry.key not in (PLAN, _COPYING)])
        engine.sweep()
        engine.delete([PLAN])
        for entry in [entry for entry in engine.list(PARTS) if entry.key != _COPYING]:
            remove_late_part(engine, entry.key)
        engine.delete([_COPYING])
        if isinstance(engine, LocalEngine):
            if self.staged:  # with what killed writers left
                for name in ("data", PARTS):
                    shutil.rmtree(os.path.join(engine.root, name), ignore_errors=True)
            with contextlib.suppress(OSError):  # a task that runs twice may be writing there yet
                os.rmdir(engine.root if self.staged else os.path.join(engine.root, PARTS))

    def opened(self) -> TensorDictBase:
        """Open the dataset for reading."""
        found: TensorDictBase = open_container(self.location, storage=self.storage, mode="r", **self.options)
        return found


def remove_late_part(engine: Engine, name: str) -> None:
    """Remove a part that is there although the plan is not, and its objects.

    The parts that a dataset is made of are removed before the plan. So this one was put later, by a second run of its
    task, and nothing names its objects.

    Args:
        engine: of the place of the objects.
        name: of the part.
    """
    found = read_object(engine, name)
    if found is not None:
        objects = decode_objects(found, url=engine.where(name)).objects
        engine.delete([*(record.name for record in objects), name])


def read_object(engine: Engine, key: str) -> bytes | None:
    """Return the content of an object; None where there is none."""
    try:
        return bytes(engine.get(key, MAX_FILE_BYTES).data)
    except StoreNotFoundError:
        return None


def _is_object_layout(location: str, storage: str | None) -> bool:
    """Check whether datasets at a location are of the object layout: at URLs without the suffix of another format."""
    if "://" not in location:
        return False
    own = find_backend(location, None, "x")[0].name
    if storage not in (None, own):
        return False
    known = registry().backends().values()
    return not any(location.lower().endswith(tuple(backend.suffixes)) for backend in known if backend.suffixes)
