"""`storage_options=`: accepted names, and their names in obstore and fsspec."""

from __future__ import annotations

import difflib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from tdstore.errors import OptionError

try:
    from multiprocessing.context import get_spawning_popen
except ImportError:  # pragma: no cover - moved within the standard library once already
    from multiprocessing.popen_spawn_posix import get_spawning_popen  # type: ignore[attr-defined,no-redef]

S3 = ("s3", "s3a")
GCS = ("gs", "gcs")
AZURE = ("az", "abfs", "abfss", "azure", "adl")
HTTP = ("http", "https")
OBSTORE = (*S3, *GCS, *AZURE, *HTTP)
"""Schemes that obstore reaches."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an engine, apart from location and credentials."""

    engine: Literal["auto", "obstore", "fsspec"] = "auto"
    timeout: float = 30.0
    """Seconds for one call, all retries together (large requests get a second more for each MB)."""
    stall_timeout: float | None = None
    """Seconds without a byte after which a request is tried again; None: a quarter of `timeout`, at most 8."""
    tries: int = 5
    concurrency: int = 256
    """Requests at a time."""
    preconnect: int | None = None
    """Connections opened beside the first request, by a HEAD each; None: as many as the reader expects to need."""
    cache: str | None = None
    """Folder of a read-through cache on disk, which any number of processes may share."""
    cache_ram: int = 0
    """Bytes of a read-through cache in memory."""
    cache_bytes: int = 10 << 30
    """Most bytes of the cache on disk."""

    @property
    def stall(self) -> float:
        """Return `stall_timeout`, or its default."""
        return min(8.0, self.timeout / 4) if self.stall_timeout is None else self.stall_timeout


class StorageOptions(dict[str, Any]):
    """Options that are pickled without secrets, except for a child process that is being started.

    A pickle may end in a file or on another machine; one for a new worker does not.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        shown = dict(self) if get_spawning_popen() is not None else without_secrets(self)
        return OrderedDict, (list(shown.items()),)  # which `torch.load(weights_only=True)` accepts; opening wraps it

    def __repr__(self) -> str:
        return f"StorageOptions({', '.join(sorted(self))})"


_SECRET = ("secret", "token", "password", "passwd", "key", "connection_string", "sas", "credential", "authorization")
_NOT_SECRET = frozenset({"key", "access_key_id", "aws_access_key_id", "sse_kms_key_id", "sse_bucket_key_enabled"})


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that may be shown, also within mappings."""
    shown: dict[str, Any] = {}
    for name, value in options.items():
        if is_secret(name):
            continue
        shown[name] = without_secrets(value) if isinstance(value, Mapping) else value
    return shown


def is_secret(name: str) -> bool:
    """Check whether an option of this name must not be shown."""
    lower = name.lower()
    return lower not in _NOT_SECRET and any(word in lower for word in _SECRET)


# Names in fsspec, boto3 and the vendors' tools -> the name in obstore.
_S3_NAMES = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "username": "access_key_id",
    "password": "secret_access_key",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "anon": "skip_signature",
    "requester_pays": "request_payer",
}
_S3_OWN = (
    "access_key_id secret_access_key session_token endpoint region default_region skip_signature request_payer "
    "virtual_hosted_style_request unsigned_payload checksum_algorithm conditional_put disable_tagging "
    "disable_bulk_delete server_side_encryption sse_kms_key_id sse_bucket_key_enabled role_arn role_session_name "
    "web_identity_token_file sts_endpoint metadata_endpoint container_credentials_relative_uri "
    "container_credentials_full_uri container_authorization_token_file"
).split()
_AZURE_NAMES = {
    "anon": "skip_signature",
    "sas_token": "sas_key",
    "credential": "sas_key",
    "account_host": "endpoint",
    "endpoint_url": "endpoint",
}
_AZURE_OWN = (
    "account_name account_key client_id client_secret tenant_id authority_host sas_key token use_emulator endpoint "
    "msi_endpoint federated_token_file use_azure_cli skip_signature disable_tagging container_name"
).split()
_GCS_NAMES = {"token": "service_account", "anon": "skip_signature", "endpoint_url": "base_url"}
_GCS_OWN = "service_account service_account_key application_credentials bearer_token skip_signature base_url".split()
_COMMON = ("client_options", "use_ssl", "verify")
# fsspec's tuning options, for which obstore has other ways: accepted, without effect.
_TUNING = (
    "default_block_size default_fill_cache default_cache_type skip_instance_cache use_listings_cache "
    "max_concurrency fixed_upload_size block_size cache_type"
).split()


@dataclass(frozen=True, slots=True)
class Target:
    """Options by obstore's names, with the separate arguments of its constructors."""

    config: dict[str, Any]
    client: dict[str, Any]
    profile: str | None = None


def split_settings(options: Mapping[str, Any], url: str) -> tuple[Settings, dict[str, Any]]:
    """Split the engine's settings from the options of the library behind it.

    Raises:
        OptionError: a setting has an impossible value.
    """
    names = {f.name for f in fields(Settings)}
    chosen = {name: value for name, value in options.items() if name in names and value is not None}
    rest = {name: value for name, value in options.items() if name not in names}
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "engine": (lambda v: v in ("auto", "obstore", "fsspec"), "'auto', 'obstore' or 'fsspec'"),
        "timeout": (_positive, "a positive number of seconds"),
        "stall_timeout": (_positive, "a positive number of seconds"),
        "tries": (_count, "a positive integer"),
        "concurrency": (_count, "a positive integer"),
        "preconnect": (lambda v: _count(v) or v == 0, "a number of connections"),
        "cache": (lambda v: isinstance(v, (str, os.PathLike)), "a folder"),
        "cache_ram": (lambda v: _count(v) or v == 0, "a number of bytes"),
        "cache_bytes": (_count, "a number of bytes"),
    }
    for name, value in chosen.items():
        fine, what = checks[name]
        if not fine(value):
            raise OptionError(f"{url}: {name} must be {what}, not {value!r}", url=url)
    if "cache" in chosen:
        chosen["cache"] = os.path.abspath(os.path.expanduser(os.fspath(chosen["cache"])))
    return Settings(**chosen), rest


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def for_obstore(scheme: str, options: Mapping[str, Any], url: str) -> Target:
    """Translate options of either library into obstore's.

    Raises:
        OptionError: an unknown name; with the nearest known one.
    """
    names, own = _names_of(scheme)
    config: dict[str, Any] = {}
    client: dict[str, Any] = {}
    profile = None
    flat = dict(options)
    for nested in ("client_kwargs", "config_kwargs") if scheme in (*S3, *GCS, *AZURE) else ("client_kwargs",):
        inner = flat.pop(nested, None) or {}
        if not isinstance(inner, Mapping):
            raise OptionError(f"{url}: {nested} must be a dict, not {type(inner).__name__}", url=url)
        flat |= {k: v for k, v in inner.items() if k not in ("config", "s3", "retries", "max_pool_connections")}
        s3 = inner.get("s3")
        if isinstance(s3, Mapping) and "addressing_style" in s3:
            config["virtual_hosted_style_request"] = s3["addressing_style"] == "virtual"
    for name, value in flat.items():
        plain = name.lower()
        plain = names.get(plain, plain)
        for prefix in ("aws_", "azure_storage_", "azure_", "google_"):
            plain = plain.removeprefix(prefix)
        plain = names.get(plain, plain)
        if plain == "profile" and scheme in S3:
            profile = value
        elif name == "client_options":
            client |= dict(value or {})
        elif name == "use_ssl":
            client["allow_http"] = not value
        elif name == "verify":
            client |= _verify(value, url)
        elif name in ("headers", "default_headers") and scheme in HTTP:
            client["default_headers"] = {str(k).lower(): str(v) for k, v in dict(value).items()}
        elif plain == "connection_string" and scheme in AZURE:
            config |= _connection_string(value, url)
        elif plain in own:
            if value is not None:
                config[plain] = value
        elif name not in _TUNING:
            raise unknown(name, [*own, *names, *_COMMON, *(["profile"] if scheme in S3 else [])], url)
    if "skip_signature" in config and not config["skip_signature"]:
        del config["skip_signature"]
    if config.get("service_account") == "anon":
        del config["service_account"]
        config["skip_signature"] = True
    return Target(config, client, profile)


def _names_of(scheme: str) -> tuple[dict[str, str], list[str]]:
    if scheme in S3:
        return _S3_NAMES, _S3_OWN
    if scheme in AZURE:
        return _AZURE_NAMES, _AZURE_OWN
    if scheme in GCS:
        return _GCS_NAMES, _GCS_OWN
    return {}, ["headers"]


def unknown(name: str, known: list[str], url: str) -> OptionError:
    """Build the error for an unknown option."""
    every = [*known, *(f.name for f in fields(Settings))]
    near = difflib.get_close_matches(name, every, 1)
    return OptionError(
        f"{url}: there is no storage option {name!r}; there are {', '.join(sorted(set(every)))}",
        url=url,
        hint=f"did you mean {near[0]!r}?" if near else None,
    )


def _verify(value: Any, url: str) -> dict[str, Any]:
    if value is True or value is None:
        return {}
    if value is False:
        return {"allow_invalid_certificates": True}
    try:
        with open(value, "rb") as file:
            return {"root_certificate": file.read()}
    except (OSError, TypeError) as error:
        raise OptionError(f"{url}: verify must be True, False or a file of certificates: {error}", url=url) from error


def _connection_string(text: Any, url: str) -> dict[str, Any]:
    try:
        parts = dict(part.split("=", 1) for part in str(text).strip().strip(";").split(";"))
    except ValueError:
        raise OptionError(f"{url}: connection_string is not one of Azure: name=value;name=value...", url=url) from None
    names = {"AccountName": "account_name", "AccountKey": "account_key", "SharedAccessSignature": "sas_key"}
    found: dict[str, Any] = {names[k]: v for k, v in parts.items() if k in names}
    if "BlobEndpoint" in parts:
        found["endpoint"] = parts["BlobEndpoint"]
    elif parts.get("UseDevelopmentStorage", "").lower() == "true":
        found["use_emulator"] = True
    elif "EndpointSuffix" in parts and "AccountName" in parts:
        scheme = parts.get("DefaultEndpointsProtocol", "https")
        found["endpoint"] = f"{scheme}://{parts['AccountName']}.blob.{parts['EndpointSuffix']}"
    return found


def for_fsspec(scheme: str, options: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Translate options of either library into those of fsspec's S3; others stay unchanged."""
    if scheme not in S3:
        return dict(options)
    target = for_obstore(scheme, options, url)
    config, client = target.config, dict(options.get("client_kwargs") or {})
    words = {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token", "skip_signature": "anon"}
    found = {words[name]: value for name, value in config.items() if name in words}
    for name in ("key", "secret", "token"):
        client.pop({"key": "aws_access_key_id", "secret": "aws_secret_access_key"}.get(name, "aws_session_token"), None)
    if "region" in config:
        client["region_name"] = config["region"]
    client.pop("endpoint_url", None)
    endpoint = config.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        found["endpoint_url"] = endpoint
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region:
        client.setdefault("region_name", region)
    if target.profile:
        found["profile"] = target.profile
    if config.get("request_payer"):
        found["requester_pays"] = True
    if target.client.get("allow_invalid_certificates"):
        client["verify"] = False
    shown = {name: options[name] for name in ("config_kwargs", *_TUNING) if name in options}
    return {**shown, **found, "client_kwargs": client}
