"""The servers that the demo stores its data on, started here on loopback where their programs are installed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tests of this repository start the same servers

from tests.servers import MissingServer, ServerFailed, http_nginx, redis_server, s3_moto, s3_rgw  # noqa: E402


@dataclass
class Servers:
    """What runs, and why the rest does not."""

    s3: str | None = None
    """`s3://bucket`; its endpoint and keys are in the environment, as S3's users have them."""
    s3_kind: str = ""
    http: str | None = None
    http_folder: Path | None = None
    redis: str | None = None
    missing: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    """Start what can be started; stop it at the end."""
    found = Servers()
    with contextlib.ExitStack() as stack:

        def start(name: str, server: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
            try:
                return stack.enter_context(server())
            except (MissingServer, ServerFailed) as error:
                found.missing[name] = str(error).splitlines()[0]
                return None

        bucket = start("s3", s3_rgw)
        found.s3_kind = "Ceph RGW"
        if bucket is None:
            bucket, found.s3_kind = start("s3 in memory", s3_moto), "moto"
        if bucket is not None:
            found.s3 = f"s3://{bucket.bucket}"
            os.environ.update(bucket.env)
        served = folder / "http"
        served.mkdir(parents=True, exist_ok=True)
        if (web := start("http", lambda: http_nginx(served))) is not None:
            found.http, found.http_folder = web.url.rstrip("/"), served
        if (redis := start("redis", redis_server)) is not None:
            found.redis = redis.url.rstrip("/")
        yield found
