"""S3 endpoints: how to reach one, and moto, the in-process imitation for unit tests."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.servers.process import LOOPBACK, MissingServer

if TYPE_CHECKING:
    from obstore.store import S3Store


@dataclass(frozen=True)
class S3Server:
    """An S3 endpoint with path-style buckets and one empty bucket."""

    endpoint: str
    access_key: str
    secret_key: str
    bucket: str = ""
    region: str = "us-east-1"

    @property
    def port(self) -> int:
        return urlsplit(self.endpoint).port or 80

    @property
    def url(self) -> str:
        """`s3://bucket`; where and who is in `env` or `fsspec_options`."""
        return f"s3://{self.bucket}"

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that boto3, obstore and s3fs understand."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ALLOW_HTTP": "true",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def obstore_options(self) -> dict[str, Any]:
        """Keyword arguments of obstore's S3Store, but for bucket and prefix."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "region": self.region,
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }

    @property
    def fsspec_options(self) -> dict[str, Any]:
        """`storage_options` for fsspec's s3."""
        client = {"endpoint_url": self.endpoint, "region_name": self.region}
        return {"key": self.access_key, "secret": self.secret_key, "client_kwargs": client}

    def client(self) -> Any:
        """Return a boto3 client that tries each request once."""
        import boto3  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]

        config = Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            max_pool_connections=64,
            connect_timeout=5,
            read_timeout=100,
        )
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=config,
        )

    def store(self, prefix: str = "") -> S3Store:
        """Return an obstore store of the bucket."""
        from obstore.store import S3Store

        return S3Store(self.bucket, prefix=prefix or None, **self.obstore_options)

    def make_bucket(self, name: str = "") -> S3Server:
        """Make a bucket and return the endpoint with that bucket."""
        name = name or f"td-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(Bucket=name)
        return dataclasses.replace(self, bucket=name)

    def through(self, proxy_port: int) -> S3Server:
        """Return the same bucket seen through a proxy on another loopback port."""
        return dataclasses.replace(self, endpoint=f"http://{LOOPBACK}:{proxy_port}")


@contextmanager
def s3_moto() -> Iterator[S3Server]:
    """Run moto in a thread of this process, 0.5 s, with one bucket. Its data go with it."""
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise MissingServer(f"needs moto: pip install 'moto[server]' ({error})") from error
    # a line for each request
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=LOOPBACK, port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(f"http://{host}:{port}", "tdaccesskey", "tdsecretkey").make_bucket()
    finally:
        server.stop()
