"""Translation of the libraries' exceptions into those of tdstore, and into those that may be retried."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from tdstore.errors import (
    ConflictError,
    ReadOnlyError,
    StoreIOError,
    StoreNotFoundError,
    TDStoreError,
    UnsupportedError,
)
from tdstore_remote.engines.credentials import missing_credentials


class Again(Exception):
    """A transient fault, raised inside of engines only. `missing` is a 404, `busy` a server that limits the rate."""

    def __init__(self, reason: str, *, missing: bool = False, busy: bool = False, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.missing = missing
        self.busy = busy


class TooShort(Again):
    """An answer with too few bytes: truncated, or the object ends there."""


class NoRangesError(Exception):
    """The server answers a range with the whole object; never leaves the engines."""


class BucketNotFoundError(StoreNotFoundError):
    """There is no such bucket, and so no object in it."""


@dataclass(frozen=True, slots=True)
class Call:
    """The request, for messages."""

    url: str
    """Of the object, without secrets."""
    doing: str
    """Such as "reading"."""
    writing: bool = False


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|x-ms-error-code\W+(\w+)")
_MESSAGE = re.compile(r"<Message>(.*?)(?:</Message>|$)", re.DOTALL)
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
_BUSY = frozenset({429, 503})
_SECRETS = re.compile(
    r"((?:X-Amz-(?:Credential|Signature|Security-Token)|sig|signature|token|AWSAccessKeyId|access_token|key)=)[^&\s\"']+",
    re.IGNORECASE,
)
_USER = re.compile(r"(https?://)[^/\s@]+@")

_KEY = "storage_options={'key': ..., 'secret': ...}"
_WHO = {
    "InvalidAccessKeyId": (
        "the server does not know this access key",
        f"check AWS_ACCESS_KEY_ID or {_KEY}, and that the endpoint (AWS_ENDPOINT_URL) is the right one",
    ),
    "SignatureDoesNotMatch": (
        "the secret key is not that of the access key",
        f"check AWS_SECRET_ACCESS_KEY or {_KEY}",
    ),
    "ExpiredToken": (
        "the credentials have expired",
        "get new ones: AWS_SESSION_TOKEN, `aws sso login`, or storage_options={'token': ...}",
    ),
    "InvalidToken": (
        "the session token is not valid",
        "check AWS_SESSION_TOKEN (unset it if the keys are not temporary) or storage_options={'token': ...}",
    ),
    "RequestTimeTooSkewed": (
        "the clock of this machine differs too much from the server's",
        "set the clock; signatures are valid for minutes",
    ),
    "AuthenticationFailed": (
        "the account key or SAS token is not right, or has expired",
        "check AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or storage_options={'account_key': ...}",
    ),
    "InvalidAuthenticationInfo": (
        "the account key or token is malformed",
        "check AZURE_STORAGE_ACCOUNT_KEY or storage_options={'account_key': ...}",
    ),
    "NoAuthenticationInformation": ("no credentials were sent", "set AZURE_STORAGE_ACCOUNT_KEY"),
}
_SYNONYMS = {
    "TokenRefreshRequired": "ExpiredToken",
    "ExpiredTokenException": "ExpiredToken",
    "RequestExpired": "ExpiredToken",
    "InvalidClientTokenId": "InvalidAccessKeyId",
    "AuthFailure": "InvalidAccessKeyId",
}
_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_NO_CREDENTIALS = (
    "169.254.169.254",
    "metadata.google.internal",
    "MissingCredentials",
    "MissingAccessKeyId",
    "MissingSecretAccessKey",
    "MissingAccount",
    "Account must be specified",
)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_FULL = ("QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity", "EntityTooLarge")


def short(error: BaseException | str) -> str:
    """Return an exception's text on one line, without secrets, and of bounded length."""
    text = str(error).partition("\n\nDebug source")[0]
    text = _USER.sub(r"\1", _SECRETS.sub(r"\1...", " ".join(text.split()) or type(error).__name__))
    return text if len(text) <= 400 else f"{text[:397]}..."


def reason_of(error: BaseException) -> str:
    """Return the server's answer: its status, code and message; the library's text without them."""
    full = str(error)
    status, code = status_and_code(full)
    if status is None and not code:
        return short(_deepest(full) or error)
    said = _MESSAGE.search(full.partition("\n\nDebug source")[0])
    parts = [f"HTTP {status}" if status else "", code or "", f"({short(said[1])})" if said and said[1] else ""]
    return " ".join(part for part in parts if part)


def status_and_code(text: str) -> tuple[int | None, str | None]:
    """Return the HTTP status and the error code of S3 or Azure in an exception's text."""
    status = _STATUS.search(text)
    code = _CODE.search(text)
    return (int(status[1]) if status else None), ((code[1] or code[2]) if code else None)


_REFUSED = "connection refused"
_NO_HOST = "the host name cannot be resolved"


def _endpoint_of(url: str) -> str:
    """Describe where the user sets the server."""
    if url.startswith(("http://", "https://")):
        return "the URL names it"
    variable = "AWS_ENDPOINT_URL or " if url.startswith(("s3", "simplecache::s3")) else ""
    return f"{variable}storage_options={{'endpoint_url': ...}}"


def _deepest(text: str) -> str | None:
    """Return the innermost cause: reqwest has it at the end of its debug text, after "error sending request"."""
    for needle, said in (
        ("ConnectionRefused", _REFUSED),
        ("ConnectionReset", "connection reset"),
        ("dns error", _NO_HOST),
        ("failed to lookup address", _NO_HOST),
        ("TimedOut", "no answer in time"),
        ("kind: Timeout", "no answer in time"),
        ("IncompleteMessage", "the connection ended in the middle of the answer"),
        ("UnexpectedEof", "the connection ended in the middle of the answer"),
    ):
        if needle in text:
            return said
    return None


def of_obstore(error: BaseException, call: Call) -> Exception:
    """Translate an error of obstore into one of tdstore, or `Again`."""
    if isinstance(error, TDStoreError):
        return error
    name, text = type(error).__name__, str(error)
    status, code = status_and_code(text)
    if name in ("AlreadyExistsError", "PreconditionError") or code in ("ConditionalRequestConflict",):
        return ConflictError(f"{call.url} was changed by another writer", url=call.url)
    if "NotPartial" in text or "Range request not supported by" in text or "non-partial response" in text:
        return NoRangesError(text)
    if isinstance(error, FileNotFoundError) and status is None:
        return of_status(404, None, short(error), call)
    if name == "NotSupportedError" or name == "NotImplementedError":
        return UnsupportedError(f"{call.url}: {call.doing}: {short(error)}", url=call.url)
    if any(sign in text for sign in _NO_CREDENTIALS):
        return missing_credentials(call.url)
    if status is not None or code is not None:
        return of_status(status, code, reason_of(error), call)
    if "out of bounds" in text or "but object was only" in text or "InvalidGetRange" in text:
        return TooShort(short(error))
    if name == "PermissionDeniedError" or name == "UnauthenticatedError":
        return of_status(403, None, short(error), call)
    return of_wire(text, error, call)


def of_wire(text: str, error: BaseException, call: Call) -> Exception:
    """Translate an error without an answer of the server: names, certificates, connections."""
    lower = text.lower()
    if "certificate" in lower or "invalidcontenttype" in lower or "tls" in lower.split() or "sslerror" in lower:
        said = _deepest_of_tls(text)
        return StoreIOError(
            f"{call.url}: {call.doing}: no secure connection: {said}",
            url=call.url,
            hint="for a certificate of your own storage_options={'verify': 'ca.pem'}; "
            "an endpoint without TLS starts with http://",
        )
    if "url scheme is not allowed" in lower or "badscheme" in lower:
        return StoreIOError(
            f"{call.url}: {call.doing}: the endpoint is not https",
            url=call.url,
            hint="storage_options={'use_ssl': False} allows http",
        )
    if "builder error" in lower or "invalid url" in lower or "relativeurlwithoutbase" in lower:
        return StoreIOError(f"{call.url}: {call.doing}: the endpoint is not a URL: {short(error)}", url=call.url)
    if "content-length" in lower and "missing" in lower:
        return UnsupportedError(
            f"{call.url}: the server does not say how long the object is",
            url=call.url,
            hint="read it as simplecache::URL, which downloads it whole",
        )
    said = _deepest(text) or short(error)
    nobody = said in (_NO_HOST, _REFUSED)
    return Again(said, hint=f"check the host: {_endpoint_of(call.url)}" if nobody else None)


_TLS = re.compile(
    r"(UnknownIssuer|CaUsedAsEndEntity|NotValidForName\w*|Expired|InvalidContentType|invalid peer certificate[^\"\n]*)"
)


def _deepest_of_tls(text: str) -> str:
    found = _TLS.search(text)
    return found[1] if found else short(text)


def of_status(status: int | None, code: str | None, reason: str, call: Call) -> Exception:
    """Translate an answer of the server into an error of tdstore, or `Again`."""
    code = _SYNONYMS.get(code or "", code)
    if code == "AuthorizationFailure" and "authenticate the request" in reason:
        code = "AuthenticationFailed"
    url, where = call.url, f"{call.url}: {call.doing}"
    if code in _NO_BUCKET:
        return BucketNotFoundError(
            f"{where}: there is no bucket {bucket_of(url)!r} at this endpoint",
            url=url,
            hint=f"check the name, and the endpoint ({_endpoint_of(url)})",
        )
    if code in _WHO:
        what, hint = _WHO[code]
        return StoreIOError(f"{where}: {what} ({reason})", url=url, hint=hint, errno=errno.EACCES)
    if code in _REGION or status in (301, 307, 308):
        return StoreIOError(
            f"{where}: the bucket is in another region ({reason})",
            url=url,
            hint="set AWS_REGION or storage_options={'region': ...}",
        )
    if status in _TRANSIENT or code in ("SlowDown", "InternalError", "RequestTimeout", "ServerBusy"):
        return Again(reason, busy=status in _BUSY)
    if status in (404, 410):
        return Again(f"not found: {reason}", missing=True)
    if status == 416:
        return TooShort(reason)
    if status in (401, 403):
        if call.writing:
            return ReadOnlyError(
                f"{where}: not allowed to write there ({reason})",
                url=url,
                hint="these credentials can only read; ask for write permission, or open it with mode='r'",
            )
        return StoreIOError(
            f"{where}: not allowed to read this ({reason})",
            url=url,
            hint="these credentials have no permission, or the keys are not right; who may not list a bucket is told "
            "this of objects that do not exist, too"
            if status == 403
            else "the server wants credentials: set them in the environment or in storage_options=",
            errno=errno.EACCES,
        )
    if status in (409, 412):
        return ConflictError(f"{url} was changed by another writer", url=url)
    if status in (405, 501):
        return UnsupportedError(f"{where}: the server does not do that ({reason})", url=url)
    if status in (507, 413) or code in _FULL:
        return StoreIOError(f"{where}: no room ({reason})", url=url, errno=errno.ENOSPC)
    return StoreIOError(f"{where}: {reason}", url=url)


def bucket_of(url: str) -> str:
    """Return the bucket of a URL: `s3://bucket/key` -> `bucket`."""
    return url.partition("://")[2].partition("/")[0]


def of_fsspec(error: BaseException, call: Call) -> Exception:
    """Translate an error of an fsspec implementation or of a library below it into one of tdstore, or `Again`."""
    if isinstance(error, (TDStoreError, Again)):
        return error
    text = f"{error} {error.__cause__ or ''}"
    name = type(error).__name__
    status, code = _http_of(error)
    if code is None and error.__cause__ is not None:
        status, code = next((found for found in (_http_of(error.__cause__),) if found[1]), (status, code))
    if code in ("PreconditionFailed", "ConditionalRequestConflict") or isinstance(error, FileExistsError):
        return ConflictError(f"{call.url} was changed by another writer", url=call.url)
    if name == "NoCredentialsError" or "Unable to locate credentials" in text:
        return missing_credentials(call.url)
    if isinstance(status, int) and status >= 300:
        return of_status(
            status,
            code,
            reason_of(error) if not code else f"HTTP {status} {code if not str(code).isdigit() else ''}".rstrip(),
            call,
        )
    if "bucket does not exist" in text:
        return of_status(404, "NoSuchBucket", short(error), call)
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return Again(f"not found: {short(error)}", missing=True)
    if isinstance(error, PermissionError):
        found = next((word for word in (*_WHO, *_SYNONYMS) if word in text or _says(word) in text), None)
        return of_status(403, found, short(error), call)
    if isinstance(error, (TimeoutError, ConnectionError, EOFError)) or name in _WIRE or _root(error) in _WIRE_MODULES:
        return of_wire(text if "ertificate" in text else f"{name} {text}", error, call)
    if isinstance(error, NotImplementedError):
        return UnsupportedError(f"{call.url}: {call.doing}: this file system cannot ({short(error)})", url=call.url)
    number = getattr(error, "errno", None)
    if number in (errno.ECONNRESET, errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EPIPE, errno.EHOSTUNREACH):
        return Again(short(error))
    return StoreIOError(f"{call.url}: {call.doing}: {name}: {short(error)}", url=call.url, errno=number)


def _http_of(error: BaseException) -> tuple[int | None, str | None]:
    """Return status and code that an exception of aiohttp, requests or botocore carries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's ClientError
        about = response.get("ResponseMetadata", {})
        return about.get("HTTPStatusCode"), response.get("Error", {}).get("Code")
    for holder in (error, response):
        for name in ("status", "status_code"):
            if isinstance(status := getattr(holder, name, None), int):
                return status, None
    return None, None


# s3fs reports some refusals by the server's message only.
_SENTENCES = {
    "InvalidAccessKeyId": "Access Key Id you provided does not exist",
    "SignatureDoesNotMatch": "signature we calculated does not match",
    "ExpiredToken": "token has expired",
}


def _says(word: str) -> str:
    return _SENTENCES.get(word, word)


_WIRE = frozenset(
    {"ClientConnectorError", "ServerDisconnectedError", "ClientPayloadError", "ClientOSError", "FSTimeoutError"}
)
_WIRE_MODULES = frozenset({"aiohttp", "urllib3", "requests", "paramiko", "httpx"})


def _root(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]
