"""What options may be called, and that nothing secret is shown."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
from typing import Any

import pytest
from tdstore_remote.engines.credentials import s3_config
from tdstore_remote.opening import open_engine
from tdstore_remote.options import StorageOptions, Target, for_fsspec, for_obstore, split_settings, without_secrets
from tdstore_remote.urls import last_name, shown, split_url

import tdstore
from tdstore.engine import parent_and_name
from tdstore.errors import OptionError, StoreIOError

URL = "s3://bucket/run"


@pytest.mark.parametrize(
    "options",
    [
        {"key": "k", "secret": "s", "token": "t", "endpoint_url": "http://h:1", "client_kwargs": {"region_name": "r"}},
        {"key": "k", "secret": "s", "token": "t", "client_kwargs": {"endpoint_url": "http://h:1", "region_name": "r"}},
        {
            "access_key_id": "k",
            "secret_access_key": "s",
            "session_token": "t",
            "endpoint": "http://h:1",
            "region": "r",
        },
        {
            "aws_access_key_id": "k",
            "aws_secret_access_key": "s",
            "aws_session_token": "t",
            "AWS_ENDPOINT_URL": "http://h:1",
            "region_name": "r",
        },
    ],
    ids=["fsspec", "fsspec client_kwargs", "obstore", "aws"],
)
def test_every_dialect_of_s3_means_the_same(options: dict[str, Any]) -> None:
    assert for_obstore("s3", options, URL).config == {
        "access_key_id": "k",
        "secret_access_key": "s",
        "session_token": "t",
        "endpoint": "http://h:1",
        "region": "r",
    }
    there = for_fsspec("s3", options, URL)
    assert {k: v for k, v in there.items() if k != "client_kwargs"} == {
        "key": "k",
        "secret": "s",
        "token": "t",
        "endpoint_url": "http://h:1",
    }
    assert there["client_kwargs"] == {"region_name": "r"}


def test_other_options_are_translated() -> None:
    assert for_obstore("s3", {"anon": True}, URL).config == {"skip_signature": True}
    assert for_obstore("s3", {"anon": False}, URL).config == {}
    assert for_obstore("s3", {"use_ssl": False}, URL).client == {"allow_http": True}
    assert for_obstore("s3", {"verify": False}, URL).client == {"allow_invalid_certificates": True}
    assert for_obstore("s3", {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, URL).config == {
        "virtual_hosted_style_request": True
    }
    assert for_obstore("s3", {"profile": "me"}, URL).profile == "me"
    assert for_obstore("gs", {"token": "anon"}, "gs://b").config == {"skip_signature": True}
    text = "DefaultEndpointsProtocol=http;AccountName=me;AccountKey=a2V5;BlobEndpoint=http://h:1/me;"
    assert for_obstore("az", {"connection_string": text}, "az://c").config == {
        "account_name": "me",
        "account_key": "a2V5",
        "endpoint": "http://h:1/me",
    }
    assert for_obstore("https", {"headers": {"X-A": "b"}}, "https://h").client == {"default_headers": {"x-a": "b"}}


@pytest.mark.parametrize(
    ("scheme", "wrong", "near"),
    [
        ("s3", "secrt", "secret"),
        ("s3", "endpont_url", "endpoint_url"),
        ("s3", "time_out", "timeout"),
        ("az", "acount_key", "account_key"),
        ("gs", "service_acount", "service_account"),
        ("https", "header", "headers"),
    ],
)
def test_an_unknown_option_is_told_with_the_nearest_name(scheme: str, wrong: str, near: str) -> None:
    with pytest.raises(OptionError, match=wrong) as error:
        open_engine(f"{scheme}://bucket/x", {wrong: "x"})
    assert error.value.hint == f"did you mean {near!r}?"


@pytest.mark.parametrize(
    "setting",
    [{"timeout": 0}, {"timeout": "5"}, {"tries": 0}, {"concurrency": 1.5}, {"engine": "boto"}, {"cache_ram": -1}],
)
def test_a_setting_of_the_wrong_kind_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(setting))):
        split_settings(setting, URL)


def test_environment_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://general:1")
    config, provider = s3_config(Target({}, {}), URL)
    assert (config["endpoint"], config["region"], provider) == ("http://general:1", "us-east-1", None)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://special:1/")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    config, _ = s3_config(Target({}, {}), URL)
    assert (config["endpoint"], config["region"]) == ("http://special:1", "eu-west-1")
    assert config["virtual_hosted_style_request"] is False
    config, _ = s3_config(Target({"endpoint": "http://mine:1"}, {}), URL)
    assert config["endpoint"] == "http://mine:1"


def test_profiles_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file = tmp_path / "credentials"
    file.write_text("[me]\naws_access_key_id = k\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    _, provider = s3_config(Target({}, {}, profile="me"), URL)
    assert provider is not None
    assert provider()["access_key_id"] == "k"
    with pytest.raises(StoreIOError, match="you"):
        s3_config(Target({}, {}, profile="you"), URL)


def test_profiles_are_read_without_botocore(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("tdstore_remote.engines.credentials.load_botocore", lambda: None)
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = k\naws_secret_access_key = s%%\nregion = r\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    config, provider = s3_config(Target({}, {}), URL)
    assert (config["access_key_id"], config["secret_access_key"], config["region"]) == ("k", "s%%", "r")
    assert provider is None
    with pytest.raises(StoreIOError, match="you"):
        s3_config(Target({}, {}, profile="you"), URL)


def test_missing_credentials_are_told() -> None:
    with pytest.raises(StoreIOError, match="no credentials were found for s3://bucket/x") as error:
        open_engine("s3://bucket/x")
    assert "AWS_ACCESS_KEY_ID" in str(error.value)
    assert "anon" in str(error.value)


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("s3://bucket/x", {"key": "id"}, "AWS_SECRET_ACCESS_KEY"),
        ("az://container/x", {}, "AZURE_STORAGE_ACCOUNT_NAME"),
        ("az://container/x", {"account_name": "somebody"}, "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_half_of_the_credentials_are_missing_credentials(url: str, options: dict[str, str], named: str) -> None:
    with pytest.raises(StoreIOError, match=f"no credentials were found for {url}(.|\n)*{named}"):
        tdstore.open(url, storage_options={**options, "timeout": 5})


def test_a_machine_that_does_not_answer_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without botocore obstore asks the machine itself, and would do so until the deadline."""
    monkeypatch.setattr("tdstore_remote.engines.credentials.load_botocore", lambda: None)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreIOError, match="no credentials were found for s3://bucket/x"):
            tdstore.open("s3://bucket/x", storage_options={"timeout": 5})


# -- secrets -------------------------------------------------------------------------------
SECRET = "do-not-show-this"
SECRETS = {"key": "visible", "secret": SECRET, "token": SECRET, "client_kwargs": {"aws_secret_access_key": SECRET}}


def test_pickles_carry_no_secrets() -> None:
    options = StorageOptions(SECRETS)
    assert SECRET.encode() not in pickle.dumps(options)
    assert pickle.loads(pickle.dumps(options)) == {"key": "visible", "client_kwargs": {}}
    assert SECRET not in repr(options)


def test_a_child_that_is_started_gets_the_secrets() -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=_tell, args=(StorageOptions(SECRETS), answers))
    child.start()
    assert answers.get(timeout=200) == SECRETS
    child.join(200)
    assert child.exitcode == 0


def _tell(options: dict[str, Any], answers: Any) -> None:
    answers.put(dict(options))


def test_what_is_secret() -> None:
    names = ("account_key", "sas_token", "connection_string", "password", "session_token", "AWS_SECRET_ACCESS_KEY")
    assert without_secrets(dict.fromkeys(names, "x")) == {}
    plain = {"key": 1, "endpoint_url": 2, "access_key_id": 3, "region": 4, "timeout": 5}
    assert without_secrets(plain) == plain


def test_messages_show_no_secrets() -> None:
    assert shown("https://me:pw@host/x?sig=abc") == "https://host/x?..."
    assert shown("simplecache::https://me:pw@host/x") == "simplecache::https://host/x"
    assert shown("ftp://me:pw@host/x") == "ftp://host/x"
    assert shown("abfs://container@account.dfs.core.windows.net/x") == "abfs://container@account.dfs.core.windows.net/x"
    engine = open_engine("s3://bucket/x", {**SECRETS, "endpoint_url": "http://127.0.0.1:1"})
    assert SECRET not in repr(engine) + engine.url
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(engine)


# -- URLs ----------------------------------------------------------------------------------
def test_urls_are_taken_apart() -> None:
    assert split_url("s3://bucket/a/b/")[:3] == ("s3", "bucket", "a/b")
    assert split_url("abfs://c@account.dfs.core.windows.net/a") == ("abfs", "c", "a", "account")
    assert split_url("https://host:8/a/b")[:3] == ("https", "https://host:8", "a/b")
    assert parent_and_name("s3://b/d/x.h5") == ("s3://b/d", "x.h5")
    assert parent_and_name("simplecache::s3://b/x.h5") == ("simplecache::s3://b", "x.h5")
    assert parent_and_name("zip://d/x.h5::s3://b/a.zip") == ("zip://d::s3://b/a.zip", "x.h5")
    assert last_name("https://host/a/x.zarr/?sig=1") == "x.zarr"
    assert last_name("zip::s3://b/x.zip") == "x.zip"
    for url in ("s3://", "s3:///x", "https:///x"):
        with pytest.raises(OptionError):
            split_url(url)
    with pytest.raises(OptionError, match="names no file"):
        parent_and_name("s3://bucket")
    with pytest.raises(OptionError, match="https://host names no file"):
        parent_and_name("https://user:password@host?sig=1")
