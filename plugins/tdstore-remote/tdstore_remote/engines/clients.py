"""Clients of obstore: how one is built, and which engines share one and its connections."""

from __future__ import annotations

import base64
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import unquote

from tdstore_remote.engines.credentials import s3_config
from tdstore_remote.options import AZURE, HTTP, S3, Settings, Target
from tdstore_remote.urls import Place

_ENVIRONMENT = ("AWS_", "AZURE_", "GOOGLE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT")
"""Beginnings of the names of environment variables that a client reads when it is built."""
_CREDENTIALS = frozenset(
    "access_key_id skip_signature account_key sas_key use_emulator service_account_key bearer_token".split()
)
"""Options that are credentials, and do not name a file of them."""


class Client:
    """A client, which ends with the last engine that refers to it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.preconnected = 0
        """Connections that were opened before a read needed them."""


_lock = threading.Lock()
_shared: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()


def _after_fork() -> None:
    # The lock may be held, and clients do not work in a forked process.
    global _lock
    _lock = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)


def reading_client(place: Place, target: Target, settings: Settings, build_one: Callable[[], Client]) -> Client:
    """Return the client with which engines for a URL read: the same one while any of them exists.

    A new client has no connections, and the first request of each costs as long as one more request.

    Args:
        place: the parts of the URL.
        target: the options.
        settings: the settings of the engine.
        build_one: builds a client for these.
    """
    if not _names_credentials(place, target):  # they come from files, which may have changed
        return build_one()
    environment = sorted(item for item in os.environ.items() if item[0].upper().startswith(_ENVIRONMENT))
    parts = (place, target.profile, sorted(target.config.items()), sorted(target.client.items()), settings.stall)
    name = repr((parts, environment))
    with _lock:
        found = _shared.get(name)
        if found is None:
            found = _shared[name] = build_one()
        return found


def _names_credentials(place: Place, target: Target) -> bool:
    """Check whether options and the environment say all that a client needs."""
    if place.scheme in HTTP or not target.config.keys().isdisjoint(_CREDENTIALS):
        return True
    return place.scheme in S3 and target.profile is None and "AWS_ACCESS_KEY_ID" in os.environ


def build(
    obstore: Any,
    url: str,
    place: Place,
    target: Target,
    settings: Settings,
    *,
    reading: bool = True,
    headers: Mapping[str, str] | None = None,
) -> Client:
    """Build a client of its own.

    Args:
        obstore: the module.
        url: the URL, for messages.
        place: its parts.
        target: the options.
        settings: the settings of the engine.
        reading: whether an answer may not stall: reqwest counts the time that an upload takes as a stall.
        headers: sent with every request.
    """
    stores, prefix = obstore.store, place.prefix or None
    connect = timedelta(seconds=min(10.0, settings.stall))
    client = {"connect_timeout": connect, "timeout": timedelta(days=1), "http1_only": True, **target.client}
    if reading:
        client.setdefault("read_timeout", timedelta(seconds=settings.stall))
    if headers:
        client["default_headers"] = {**client.get("default_headers", {}), **headers}
    shared: dict[str, Any] = {"retry_config": {"max_retries": 0, "retry_timeout": timedelta(days=1)}}
    if place.scheme in HTTP:
        client.setdefault("allow_http", place.scheme == "http")
        scheme, _, host = place.bucket.partition("://")
        user, _, host = host.rpartition("@")
        if user:
            word = base64.b64encode(unquote(user).encode()).decode()
            client["default_headers"] = {**client.get("default_headers", {}), "authorization": f"Basic {word}"}
        return Client(stores.HTTPStore(f"{scheme}://{host}/{place.prefix}", client_options=client, **shared))
    if place.scheme in S3:
        config, provider = s3_config(target, url)
        client.setdefault("allow_http", config.get("endpoint", "").startswith("http://"))
        if provider is not None:
            shared["credential_provider"] = provider
        return Client(stores.S3Store(place.bucket, prefix=prefix, client_options=client, **config, **shared))
    config = dict(target.config)
    if place.scheme in AZURE:
        config.pop("container_name", None)
        if place.account:
            config.setdefault("account_name", place.account)
        endpoint = str(config.get("endpoint", ""))
        client.setdefault("allow_http", endpoint.startswith("http://") or bool(config.get("use_emulator")))
        return Client(stores.AzureStore(place.bucket, prefix=prefix, client_options=client, **config, **shared))
    client.setdefault("allow_http", str(config.pop("base_url", "")).startswith("http://"))
    return Client(stores.GCSStore(place.bucket, prefix=prefix, client_options=client, **config, **shared))
