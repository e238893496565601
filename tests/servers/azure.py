"""Azure blobs: azurite, Microsoft's emulator from npm, with one container."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import http.client
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.servers.npm import HINT, MODULES
from tests.servers.process import LOOPBACK, Folder, Server, ServerFailed, find_program, listens, start

if TYPE_CHECKING:
    from obstore.store import AzureStore

ACCOUNT = "devstoreaccount1"
# the emulator's published key, which every client library knows
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class AzureServer:
    """A blob endpoint with one empty container."""

    port: int
    container: str = ""
    account: str = ACCOUNT
    key: str = KEY

    @property
    def endpoint(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/{self.account}"

    @property
    def url(self) -> str:
        """`az://container`; where and who is in `env`."""
        return f"az://{self.container}"

    @property
    def connection_string(self) -> str:
        parts = {"DefaultEndpointsProtocol": "http", "AccountName": self.account, "AccountKey": self.key}
        return "".join(f"{k}={v};" for k, v in {**parts, "BlobEndpoint": self.endpoint}.items())

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that obstore and adlfs understand."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_STORAGE_CONNECTION_STRING": self.connection_string,
            "AZURE_ALLOW_HTTP": "true",
        }

    @property
    def obstore_options(self) -> dict[str, Any]:
        """Keyword arguments of obstore's AzureStore, but for container and prefix."""
        return {
            "account_name": self.account,
            "account_key": self.key,
            "endpoint": self.endpoint,
            "client_options": {"allow_http": True},
        }

    def store(self, prefix: str = "") -> AzureStore:
        """Return an obstore store of the container."""
        from obstore.store import AzureStore

        return AzureStore(self.container, prefix=prefix or None, **self.obstore_options)

    def make_container(self, name: str = "") -> AzureServer:
        """Make a container and return the endpoint with that container."""
        name = name or f"td-{uuid.uuid4().hex[:16]}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        # Shared Key: 11 standard headers, all absent here, then the x-ms- ones and the resource
        signed = "".join(f"{k}:{v}\n" for k, v in sorted(headers.items()))
        text = f"PUT{12 * chr(10)}{signed}/{self.account}/{self.account}/{name}\nrestype:container"
        digest = hmac.digest(base64.b64decode(self.key), text.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=20)
        try:
            connection.request("PUT", f"/{self.account}/{name}?restype=container", headers=headers)
            answer = connection.getresponse()
            if answer.status != 201:
                raise ServerFailed(f"azurite did not make container {name}: {answer.status} {answer.read()!r}")
        finally:
            connection.close()
        return dataclasses.replace(self, container=name)

    def through(self, proxy_port: int) -> AzureServer:
        """Return the same container seen through a proxy on another loopback port."""
        return dataclasses.replace(self, port=proxy_port)


def program() -> str:
    """Return the path of azurite's blob server."""
    given = os.environ.get("TDSTORE_AZURITE")
    return find_program(
        "azurite-blob",
        HINT,
        given and Path(given, "azurite-blob") if given and os.path.isdir(given) else given,
        MODULES / ".bin" / "azurite-blob",
        "/tmp/azt/node_modules/.bin/azurite-blob",
    )


@contextmanager
def azurite() -> Iterator[AzureServer]:
    """Run azurite's blob server in memory. TDSTORE_AZURITE names its azurite-blob program, or the folder of it."""
    command = [program(), "--blobHost", LOOPBACK, "--inMemoryPersistence", "--disableTelemetry"]
    command += ["--skipApiVersionCheck", "--silent"]
    folder = Folder("azurite")

    def attempt(port: int) -> tuple[Server, int]:
        server = Server([*command, "--blobPort", str(port)], folder.path / "azurite.log")
        server.wait_until(lambda: listens(port))
        return server, port

    try:
        server, port = start(attempt)
        try:
            yield AzureServer(port).make_container()
        finally:
            server.kill()  # in memory: nothing to close in order
    finally:
        folder.remove()
