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
from tdstore.testing.kit import StoreTests
from tdstore.testing.setup import Location

JOB = "TDSTORE_KIT_JOB"
_job: dict[str, Any] = json.loads(os.environ.get(JOB, "{}"))


class TestInstalled(StoreTests):
    """All tests of the kit, on a backend by name or an opener given as `module:function`."""

    __test__ = bool(_job)
    backend = _job.get("backend")
    caps = Cap(_job.get("caps", 0))
    options = _job.get("options", {})

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
