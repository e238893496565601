"""All that a server and a wire can do wrong: mended, or told within the deadline. Never wrong data, never a hang."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from remotehelp import name, open_remote, same, sample
from tdstore_remote.engines import loop
from tdstore_remote.faults import Again, Call, of_fsspec, of_obstore, short
from tdstore_remote.opening import open_engine

import tdstore
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    ReadOnlyError,
    StoreError,
    StoreIOError,
    StoreNotFoundError,
    TransientError,
)
from tdstore.index.ranges import Range
from tests.references import frees_its_caller
from tests.servers import AzureServer, FaultProxy, S3Server

TIMEOUT = 2.5
PATIENT = 30.0
"""Of what must succeed: a busy machine needs its time."""
SOON = 10.0
"""A call that ends by then has kept `TIMEOUT`: the default is 30 s, and some faults last for ever."""
STALL = 0.8

FAULTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "500": ("answer", (500,)),
    "503": ("answer", (503,)),
    "429": ("answer", (429,)),
    "reset in mid-body": ("reset", (40,)),
    "reset before the body": ("reset", (0,)),
    "short body": ("short", (40,)),
    "stall in mid-body": ("stall", (40,)),
    "no answer": ("stall", (None,)),
}


@pytest.fixture(params=["obstore", "fsspec"])
def options(request: pytest.FixtureRequest, faulty: S3Server) -> dict[str, Any]:
    return {**faulty.fsspec_options, "timeout": PATIENT, "stall_timeout": STALL, "engine": request.param}


def set_fault(proxy: FaultProxy, fault: str, **which: Any) -> Any:
    kind, arguments = FAULTS[fault]
    if kind == "answer" and fault != "500":
        which["retry_after"] = 0.1
    return getattr(proxy, kind)(*arguments, **which)


@pytest.mark.parametrize("fault", FAULTS)
def test_passing_faults_are_mended(fault: str, proxy: FaultProxy, faulty: S3Server, options: dict[str, Any]) -> None:
    data = bytes(range(256))
    with open_engine(f"{faulty.url}/{name()}", options) as engine:
        engine.put("a", data)
        done = set_fault(proxy, fault, times=3, method="GET")
        assert [bytes(d) for d in engine.get_ranges([Range("a", 10, 200), Range("a", -50, None)])] == [
            data[10:200],
            data[-50:],
        ]
        assert done.hits == 3


@pytest.mark.parametrize("fault", FAULTS)
def test_lasting_faults_are_told_in_time(fault: str, proxy: FaultProxy, faulty: S3Server) -> None:
    options = {**faulty.fsspec_options, "timeout": TIMEOUT, "stall_timeout": STALL}
    with open_engine(f"{faulty.url}/{name()}", options) as engine:
        engine.put("some/key", bytes(1000))
        set_fault(proxy, fault, method="GET")
        for work in (
            lambda: engine.get_ranges([Range("some/key", 0, 900)]),
            lambda: engine.get_ranges([Range("some/key", i, i + 90) for i in range(0, 900, 100)]),
            lambda: engine.get("some/key"),
        ):
            start = time.monotonic()
            with pytest.raises(TransientError, match=r"some/key: reading.* failed \d times"):
                work()
            assert time.monotonic() - start < SOON


@pytest.mark.parametrize("fault", ["503", "stall in mid-body"])
def test_lasting_faults_below_fsspec_too(fault: str, proxy: FaultProxy, faulty: S3Server) -> None:
    options = {**faulty.fsspec_options, "timeout": TIMEOUT, "stall_timeout": STALL, "engine": "fsspec"}
    with open_engine(f"{faulty.url}/{name()}", options) as engine:
        engine.put("some/key", bytes(1000))
        set_fault(proxy, fault, method="GET")
        start = time.monotonic()
        with pytest.raises(TransientError, match="some/key"):
            engine.get_ranges([Range("some/key", 0, 900)])
        assert time.monotonic() - start < SOON


@pytest.mark.parametrize("fault", ["500", "503", "no answer"])
def test_writes_are_tried_again(fault: str, proxy: FaultProxy, faulty: S3Server) -> None:
    where, options = f"{faulty.url}/{name()}", {**faulty.fsspec_options, "stall_timeout": STALL}
    with open_engine(where, {**options, "timeout": PATIENT}) as engine:
        set_fault(proxy, fault, times=2, method="PUT")
        engine.put_many([("a", b"1"), ("b", b"2")])
        assert bytes(engine.get("b").data) == b"2"
    with open_engine(where, {**options, "timeout": TIMEOUT}) as engine:
        set_fault(proxy, fault, method="PUT")
        with pytest.raises(TransientError, match="/a: writing"):
            engine.put("a", b"1")


def test_a_removal_without_an_answer_is_tried_again(proxy: FaultProxy, faulty: S3Server) -> None:
    options = {**faulty.fsspec_options, "timeout": PATIENT, "stall_timeout": STALL}
    with open_engine(f"{faulty.url}/{name()}", options) as engine:
        engine.put_many([("a", b"1"), ("b", b"2")])
        for methods in ("DELETE", "POST"):
            set_fault(proxy, "no answer", times=1, method=methods)
        engine.delete(["a", "b"])
        assert list(engine.list()) == []


def test_a_server_that_is_down(proxy: FaultProxy, faulty: S3Server) -> None:
    with open_engine(f"{faulty.url}/{name()}", {**faulty.fsspec_options, "timeout": TIMEOUT}) as engine:
        proxy.cut()
        proxy.refuse()
        with pytest.raises(TransientError, match="connection"):
            engine.get("a")


def test_an_object_is_looked_for_again(proxy: FaultProxy, faulty: S3Server) -> None:
    """A 404 of what a manifest names may pass; one that lasts is an error, never zeros."""
    where = f"{faulty.url}/{name()}"
    sample().save(where, storage_options=faulty.fsspec_options)
    with tdstore.open(where, storage_options=faulty.fsspec_options) as td:
        passing = proxy.answer(404, times=2, method="GET")
        assert td[7]["action"].item() == 7
        assert passing.hits == 2
        proxy.answer(404, method="GET")
        with pytest.raises(CorruptStoreError, match="is missing"):
            td[8].to_tensordict()


# -- the store over a bad wire ----------------------------------------------------------------
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_over_a_bad_wire(fault: str, proxy: FaultProxy, faulty: S3Server) -> None:
    options = {**faulty.fsspec_options, "timeout": 20, "stall_timeout": 1}
    where, td = f"{faulty.url}/{name()}", sample()
    set_fault(proxy, fault, every=4)
    td.save(where, storage_options=options)
    with tdstore.open(where, storage_options=options) as stored:
        assert same(stored, td)
        rows = torch.tensor([5, 290, 5, 17])
        assert same(stored[rows], td[rows])


@pytest.mark.parametrize("at", [0, 700])
def test_flipped_bytes_are_noticed(at: int, proxy: FaultProxy, faulty: S3Server) -> None:
    where = f"{faulty.url}/{name()}"
    sample().save(where, storage_options=faulty.fsspec_options)
    with tdstore.open(where, storage_options=faulty.fsspec_options) as td:
        proxy.flip(at, method="GET")
        with pytest.raises(CorruptStoreError):
            td["obs"]
    with pytest.raises(CorruptStoreError):
        tdstore.open(where, storage_options=faulty.fsspec_options)


def test_a_lost_acknowledgement_is_found_out(proxy: FaultProxy, faulty: S3Server) -> None:
    """The manifest landed, its answer was lost: the save has worked, and says so."""
    where, td = f"{faulty.url}/{name()}", sample()
    with open_engine(where, faulty.fsspec_options) as engine:
        assert engine.conditional()  # the probe is not what is lost
    lost = proxy.drop_ack(method="PUT", path="tdstore.json", times=1)
    td.save(where, storage_options=faulty.fsspec_options)
    assert lost.hits == 1
    assert same(tdstore.open(where, storage_options=faulty.fsspec_options), td)


def test_a_failed_save_leaves_the_old(proxy: FaultProxy, faulty: S3Server) -> None:
    where, td = f"{faulty.url}/{name()}", sample()
    td.save(where, storage_options=faulty.fsspec_options)
    for path in ("tdstore.json", r"\.bin|data"):
        proxy.answer(500, method="PUT", path=path)
        with pytest.raises(TransientError):
            sample(50).save(where, storage_options={**faulty.fsspec_options, "timeout": 1})
        proxy.clear()
        assert same(tdstore.open(where, storage_options=faulty.fsspec_options), td)


# -- who, where, and what for ------------------------------------------------------------------
def test_a_wrong_bucket_is_told(rgw: S3Server) -> None:
    for work in (
        lambda: tdstore.open("s3://no-such-bucket/x", storage_options=rgw.fsspec_options),
        lambda: sample().save("s3://no-such-bucket/x", storage_options=rgw.fsspec_options),
        lambda: open_engine("s3://no-such-bucket/x", {**rgw.fsspec_options, "engine": "fsspec"}).get("a"),
    ):
        with pytest.raises(StoreNotFoundError, match="there is no bucket 'no-such-bucket'"):
            work()


WRONG = {
    "key": ({"key": "wrong"}, StoreIOError, "does not know this access key", "AWS_ACCESS_KEY_ID"),
    "secret": ({"secret": "wrong"}, StoreIOError, "the secret key is not that", "AWS_SECRET_ACCESS_KEY"),
    "anonymous": ({"anon": True}, StoreIOError, "not allowed to read", "no permission"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_credentials_are_told(wrong: str, rgw: S3Server) -> None:
    change, kind, text, hint = WRONG[wrong]
    options = {**rgw.fsspec_options, **change}
    if "anon" in change:
        options = {"anon": True, "endpoint_url": rgw.endpoint}
    with pytest.raises(kind, match=text) as error:
        open_remote(f"{rgw.url}/x", storage_options=options)
    assert hint in str(error.value)
    assert rgw.secret_key not in str(error.value)


def test_read_only_credentials_are_told(rgw: S3Server) -> None:
    """A bucket that everybody may read: anonymous reads work, writes are refused by the server."""
    bucket = rgw.make_bucket()
    allowed = {"Effect": "Allow", "Principal": "*", "Action": ["s3:GetObject", "s3:ListBucket"]}
    resources = [f"arn:aws:s3:::{bucket.bucket}", f"arn:aws:s3:::{bucket.bucket}/*"]
    policy = json.dumps({"Version": "2012-10-17", "Statement": [{**allowed, "Resource": resources}]})
    bucket.client().put_bucket_policy(Bucket=bucket.bucket, Policy=policy)
    where, anybody = f"{bucket.url}/{name()}", {"anon": True, "endpoint_url": rgw.endpoint}
    sample().save(where, storage_options=bucket.fsspec_options)
    with tdstore.open(where, storage_options=anybody) as td:
        assert same(td, sample())
    with pytest.raises(ReadOnlyError, match="not allowed to write") as error:
        sample(50).save(where, storage_options=anybody)
    assert "mode='r'" in str(error.value)
    with tdstore.open(where, storage_options=anybody) as td:
        assert same(td, sample())


def test_wrong_azure_credentials_are_told(azure: AzureServer) -> None:
    options = {"account_name": azure.account, "account_key": "d3Jvbmc=", "endpoint": azure.endpoint}
    with pytest.raises(StoreIOError, match="account key or SAS token") as error:
        open_remote(f"{azure.url}/x", storage_options=options)
    assert "AZURE_STORAGE_ACCOUNT_KEY" in str(error.value)
    with pytest.raises(StoreNotFoundError, match="no bucket 'nobody-made-this'"):
        open_remote("az://nobody-made-this/x", storage_options={"connection_string": azure.connection_string})


def test_no_such_host_and_no_tls(s3: S3Server) -> None:
    options = {**s3.fsspec_options, "client_kwargs": {}, "timeout": PATIENT, "tries": 2}
    with pytest.raises(TransientError, match="host name cannot be resolved") as error:
        open_remote(f"{s3.url}/x", storage_options={**options, "endpoint_url": "http://no-such-host.invalid"})
    assert "AWS_ENDPOINT_URL" in str(error.value)
    with pytest.raises(StoreIOError, match="no secure connection"):
        open_remote(f"{s3.url}/x", storage_options={**options, "endpoint_url": f"https://127.0.0.1:{s3.port}"})


CODES = {
    "ExpiredToken": (400, StoreIOError, "expired"),
    "TokenRefreshRequired": (400, StoreIOError, "expired"),
    "RequestTimeTooSkewed": (403, StoreIOError, "clock"),
    "InvalidToken": (400, StoreIOError, "session token"),
    "PermanentRedirect": (301, StoreIOError, "another region"),
    "AccessDenied": (403, StoreIOError, "not allowed"),
    "QuotaExceeded": (403, StoreIOError, "not allowed"),
    "NoSuchBucket": (404, StoreNotFoundError, "no bucket"),
    "PreconditionFailed": (412, ConflictError, "another writer"),
    "NotImplemented": (501, NotImplementedError, "does not do that"),
    "InsufficientStorage": (507, StoreIOError, "no room"),
    "SlowDown": (503, Again, "SlowDown"),
    "InternalError": (200, Again, "InternalError"),
}


@pytest.mark.parametrize("code", CODES)
def test_what_servers_say(code: str) -> None:
    status, kind, text = CODES[code]
    error = Exception(
        f"status code: {status} X: <Error><Code>{code}</Code><Message>m</Message></Error>\n\nDebug source: x"
    )
    found = of_obstore(error, Call("s3://bucket/key", "reading"))
    assert isinstance(found, kind)
    assert text in str(found)
    cause = OSError(5, "wrapped")
    client_error = type("ClientError", (Exception,), {})(code)
    client_error.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    cause.__cause__ = client_error
    if status >= 300:
        assert isinstance(of_fsspec(cause, Call("s3://bucket/key", "reading")), kind)


def test_every_exception_of_obstore_is_mapped() -> None:
    import obstore.exceptions

    for found in vars(obstore.exceptions).values():
        if isinstance(found, type) and issubclass(found, obstore.exceptions.BaseError):
            ours = of_obstore(found("something\n\nDebug source:\nsecrets"), Call("s3://b/k", "reading"))
            assert isinstance(ours, (StoreError, Again)), found
            assert "secrets" not in str(ours)


def test_texts_lose_their_secrets() -> None:
    text = "GET https://me:pw@host/x?X-Amz-Signature=abc&sig=def&a=1 failed"
    assert "abc" not in short(text)
    assert "def" not in short(text)
    assert "pw" not in short(text)
    assert "a=1" in short(text)


def test_a_call_ends_when_it_is_interrupted(proxy: FaultProxy, faulty: S3Server) -> None:
    """Cancelling an asynchronous read lets go at once."""
    import asyncio

    options = {**faulty.fsspec_options, "timeout": 200, "stall_timeout": 100}
    with open_engine(f"{faulty.url}/{name()}", options) as engine:
        engine.put("a", bytes(100))
        proxy.stall(10, method="GET")

        async def work() -> None:
            async with asyncio.timeout(0.2):
                await engine.aget_ranges([Range("a", 0, 50)])

        start = time.monotonic()
        with pytest.raises(TimeoutError):
            asyncio.run(work())
        assert time.monotonic() - start < 50


@pytest.mark.parametrize("suffix", ["", ".zarr"])
def test_a_place_that_is_not_there_holds_nothing(suffix: str) -> None:
    """The error would hold the frames of its callers, until Python looks for cycles."""

    assert frees_its_caller(lambda: tdstore.open(f"memory://none/of-that-name{suffix}"), StoreNotFoundError)


def test_an_error_of_the_background_loop_holds_nothing() -> None:
    async def fail() -> None:
        raise ZeroDivisionError("by 0")

    assert frees_its_caller(lambda: loop.run(fail()), ZeroDivisionError)
