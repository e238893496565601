"""The kit on the backends of `python -m tdstore.testing`; the job comes in the environment."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from tdstore.hookspecs import Backend
from tdstore.registry import registry
from tdstore.store import Cap
from tdstore.testing.crash import CrashTests
from tdstore.testing.kit import StoreTests
from tdstore.testing.setup import Location, StoreSetup

JOB = "TDSTORE_KIT_JOB"
_job: dict[str, Any] = json.loads(os.environ.get(JOB, "{}"))


class _Installed(StoreSetup):
    """The backend of the job, by name or by an opener given as `module:function`."""

    backend = _job.get("backend")
    caps = Cap(_job.get("caps", 0))
    options = _job.get("options", {})
    one_process = _job.get("one_process", "")

    @pytest.fixture
    def location(self, tmp_path: Path) -> Location:
        """Return a fresh location below `--location`, or in a temporary folder."""
        base = _job["location"]
        if base is None:
            return None
        if "://" in base:
            return f"{base.rstrip('/')}/{uuid.uuid4().hex}{_job['suffix']}"
        return (Path(base) if base else tmp_path) / uuid.uuid4().hex / f"store{_job['suffix']}"

    def declaration(self) -> Backend:
        """Return the backend by name, or one made of the opener."""
        if self.backend is not None:
            return registry().get(self.backend)
        return Backend(name=_job["opener"].partition(":")[2], opener=_job["opener"], summary="under test")


class TestInstalled(_Installed, StoreTests):
    """All tests of the kit."""

    __test__ = bool(_job)


class TestInstalledCrashes(_Installed, CrashTests):
    """Kills at every change of the storage, of which the author has said nothing but the works of `--dirty`."""

    __test__ = bool(_job.get("crash"))
    outcomes = {work: {"old", "dirty", "new"} for work in _job.get("dirty", ())}  # noqa: RUF012
    # These options mean the same for every backend that has them.
    reading = {"verify": "full"} if "verify" in _job.get("opener_options", ()) else {}
    durable = (
        {"durable": "commit"} if "durable" in _job.get("opener_options", ()) else {} if _job.get("synced") else None
    )
