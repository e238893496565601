"""Credentials of a store: from options, the usual environment variables, and AWS profiles."""

from __future__ import annotations

import errno
import http.client
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tdstore.errors import StoreIOError
from tdstore_remote.libraries import load_botocore
from tdstore_remote.options import Target

_PROVIDERS = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)

METADATA = "http://169.254.169.254"
"""Where a machine of AWS answers questions about itself."""
METADATA_SECONDS = 1.0
"""How long it may take; botocore waits as long."""


def s3_config(target: Target, url: str) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """Return the configuration of an S3 store, with endpoint, region and keys decided, and a provider of expiring keys.

    Raises:
        StoreIOError: a profile was requested that does not exist.
    """
    config = dict(target.config)
    env = os.environ
    endpoint = config.get("endpoint") or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
    endpoint = endpoint or env.get("AWS_ENDPOINT")
    if endpoint:
        config["endpoint"] = endpoint.rstrip("/")
        style = env.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "false")
        config.setdefault("virtual_hosted_style_request", style.lower() in ("1", "true"))
    profile = target.profile or (None if "AWS_ACCESS_KEY_ID" in env else env.get("AWS_PROFILE"))
    region = config.get("region") or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    provider = None
    has_credentials = "access_key_id" in config or config.get("skip_signature") or "AWS_SKIP_SIGNATURE" in env
    from_env = "AWS_ACCESS_KEY_ID" in env or any(name in env for name in _PROVIDERS)
    if not has_credentials and (profile or not from_env):
        found, provider, its_region = _from_files(profile, url)
        if not found and provider is None and not _on_a_machine_of_aws(str(config.get("metadata_endpoint") or "")):
            raise missing_credentials(url)
        config |= found
        region = region or its_region
    config["region"] = region or "us-east-1"
    return config, provider


def missing_credentials(url: str) -> StoreIOError:
    """Build the error for a store that requires credentials."""
    scheme = url.partition("://")[0]
    how = {
        "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or storage_options={'account_name': ..., ...}",
        "gs": "GOOGLE_APPLICATION_CREDENTIALS, or storage_options={'service_account': path}",
    }.get(
        {"abfs": "az", "abfss": "az", "azure": "az", "adl": "az", "gcs": "gs"}.get(scheme, scheme),
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or storage_options={'key': ..., 'secret': ...}",
    )
    return StoreIOError(
        f"no credentials were found for {url}",
        url=url,
        hint=f"set {how}; for public data storage_options={{'anon': True}}. "
        "A pickle carries no secrets: other machines need the environment variables too",
        errno=errno.EACCES,
    )


def _on_a_machine_of_aws(endpoint: str) -> bool:
    """Check whether the machine itself may have credentials, which obstore would request from it.

    Without an answer obstore repeats the request until the deadline of the call, so this checks first.
    """
    # botocore has tried already.
    if load_botocore() is not None or os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    address = urlsplit(endpoint or os.environ.get("AWS_METADATA_ENDPOINT") or METADATA)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=METADATA_SECONDS)
    try:
        connection.request("PUT", "/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def _from_files(profile: str | None, url: str) -> tuple[dict[str, Any], Callable[[], Any] | None, str | None]:
    sessions = load_botocore()
    if sessions is None:
        return (*_static_keys(profile, url),)
    try:
        session = sessions.Session(profile=profile)
        keys = session.get_credentials()
        region = session.get_config_variable("region")
    except Exception as error:  # botocore's family has no common root that is public
        raise StoreIOError(f"{url}: AWS credentials could not be loaded: {error}", url=url) from error
    if keys is None:
        return {}, None, region

    def provide() -> dict[str, Any]:
        frozen = keys.get_frozen_credentials()
        # Static keys never expire; the others renew themselves on request, and are requested again after a while.
        expires = getattr(keys, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires,
        }

    return {}, provide, region


def _static_keys(profile: str | None, url: str) -> tuple[dict[str, Any], None, str | None]:
    import configparser  # here, since few stores have profiles

    path = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path)
    except configparser.Error as error:
        raise StoreIOError(f"{url}: {path} is not readable: {error}", url=url) from error
    section = profile or "default"
    if not parser.has_section(section):
        if profile:
            raise StoreIOError(
                f"{url}: there is no AWS profile {profile!r} in {path}",
                url=url,
                hint="pip install botocore, which knows every place where AWS keeps credentials",
            )
        return {}, None, None
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
    }
    found = {ours: parser.get(section, theirs) for theirs, ours in names.items() if parser.has_option(section, theirs)}
    return found, None, parser.get(section, "region", fallback=None)
