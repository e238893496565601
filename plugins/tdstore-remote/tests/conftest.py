"""Fixtures of this plugin's tests; servers are in the root conftest, helpers in `remotehelp`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path as FsPath

import pytest
import torch

from tests.servers import FaultProxy, S3Server

torch.set_num_threads(1)  # many tests fork, and OpenMP threads do not survive that
sys.path.insert(0, str(FsPath(__file__).parent))

SECRETS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"),
    *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
)


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: FsPath) -> None:
    """No test sees the credentials of whoever runs it."""
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.port, latency_ms=4) as running:
        yield running


@pytest.fixture
def slow(proxy: FaultProxy) -> Iterator[FaultProxy]:
    """The proxy with so long a way that what is asked for at once overlaps on a busy machine, too."""
    before, proxy.latency_ms = proxy.latency_ms, 60.0
    yield proxy
    proxy.latency_ms = before


@pytest.fixture
def faulty(s3: S3Server, proxy: FaultProxy) -> Iterator[S3Server]:
    """The bucket of moto, seen through `proxy`."""
    yield s3.through(proxy.port)
    proxy.clear()
    proxy.refuse(False)
    proxy.cut()
    proxy.forget()
