"""The contract of `tdstore.engine.Engine`, on every kind of engine; and what conditional puts are taken for."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from collections.abc import Iterator
from typing import Any

import obstore.store
import pytest
from remotehelp import name
from tdstore_remote.engines import conditional_puts
from tdstore_remote.opening import open_engine

from tdstore.engine import Engine, Entry
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    MissingDependencyError,
    StoreIOError,
    StoreNotFoundError,
    TransientError,
    UnsupportedError,
)
from tdstore.index.ranges import Range

DATA = bytes(range(256)) * 8


@pytest.fixture(params=["s3", "s3 over fsspec", "rgw", "azure", "memory", "file"])
def engine(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Engine]:
    kind = request.param
    options: dict[str, Any] = {}
    if kind in ("s3", "s3 over fsspec", "rgw"):
        server = request.getfixturevalue("rgw" if kind == "rgw" else "s3")
        url, options = f"{server.url}/{name()}", dict(server.fsspec_options)
        options |= {"engine": "fsspec"} if "fsspec" in kind else {}
    elif kind == "azure":
        server = request.getfixturevalue("azure")
        url, options = f"{server.url}/{name()}", {"connection_string": server.connection_string}
    elif kind == "memory":
        url = f"memory://{name()}/x"
    else:
        url = f"file://{tmp_path}/x"
    with open_engine(url, options) as found:
        yield found


def test_objects_come_back(engine: Engine) -> None:
    engine.put("a", DATA)
    engine.put("deep/er/b", memoryview(DATA)[:10])
    engine.put("empty", b"")
    assert bytes(engine.get("a").data) == DATA
    assert bytes(engine.get("deep/er/b", 10).data) == DATA[:10]
    assert bytes(engine.get("empty", 5).data) == b""
    assert (engine.size("a"), engine.size("empty")) == (len(DATA), 0)
    assert engine.pin(["a", "empty"]) == [len(DATA), 0]
    engine.put("a", b"new")
    assert bytes(engine.get("a").data) == b"new"


def test_ranges_come_in_order(engine: Engine) -> None:
    engine.put("a", DATA)
    engine.put("b", b"0123456789")
    asked = [Range("b", 3, 5), *(Range("a", i, i + 7) for i in range(1500, 0, -13)), Range("b", 0, 10)]
    asked += [Range("a", -5, None), Range("b", 7, None), Range("b", -99, None), Range("b", 4, 4)]
    answers = [bytes(data) for data in engine.get_ranges(asked)]
    content = {"a": DATA, "b": b"0123456789"}
    expected = [content[k][max(len(content[k]) + a, 0) :] if a < 0 else content[k][a:b] for k, a, b in asked]
    assert answers == expected
    assert [bytes(d) for d in asyncio.run(engine.aget_ranges(asked))] == expected
    assert engine.get_ranges([]) == []


def test_missing_objects_are_told(engine: Engine) -> None:
    engine.put("there", DATA)
    with pytest.raises(StoreNotFoundError, match="gone"):
        engine.get("gone")
    with pytest.raises(StoreNotFoundError, match="gone"):
        engine.size("gone")
    with pytest.raises(StoreNotFoundError, match="gone"):
        engine.get_ranges([Range("there", 0, 1), Range("gone", 0, 4)])


def test_an_object_that_ends_before_is_told(engine: Engine) -> None:
    engine.put("a", DATA)
    for start, stop in ((len(DATA) - 2, len(DATA) + 2), (len(DATA) + 10, len(DATA) + 20)):
        with pytest.raises(CorruptStoreError, match="/a ends at byte"):
            engine.get_ranges([Range("a", 0, 2), Range("a", start, stop)])
    with pytest.raises(CorruptStoreError, match="more than the 100"):
        engine.get("a", 100)


def test_conditions_hold(engine: Engine) -> None:
    if not engine.conditional():
        with pytest.raises(UnsupportedError, match="only if nobody else has"):
            engine.put("a", b"1", if_absent=True)
        return
    first = engine.put("a", b"1", if_absent=True)
    assert first == engine.get("a").tag
    with pytest.raises(ConflictError, match="/a"):
        engine.put("a", b"2", if_absent=True)
    second = engine.put("a", b"2", if_match=first)
    with pytest.raises(ConflictError, match="/a"):
        engine.put("a", b"3", if_match=first)
    with pytest.raises(ConflictError, match="/none"):
        engine.put("none", b"3", if_match=second)
    assert bytes(engine.get("a").data) == b"2"
    assert [e.key for e in engine.list()] == ["a"], "the probe left something behind"


def test_rivals_of_one_put(engine: Engine) -> None:
    """Of eight that put at the same time on the same condition, one wins."""
    if not engine.conditional():
        pytest.skip("no conditional put")
    tag = engine.put("a", b"start")
    won = []
    start = threading.Barrier(8)

    def rival(me: int) -> None:
        start.wait()
        try:
            engine.put("a", b"%d" % me, if_match=tag)
            won.append(b"%d" % me)
        except ConflictError:
            return

    rivals = [threading.Thread(target=rival, args=(i,)) for i in range(8)]
    for thread in rivals:
        thread.start()
    for thread in rivals:
        thread.join()
    assert [bytes(engine.get("a").data)] == won


def test_listing_and_deleting(engine: Engine) -> None:
    names = ["run/a", "run/b%20c", "run/ü [x]", "running", "other/deep/er"]
    engine.put_many([(n, b"x" * i) for i, n in enumerate(names)])
    assert {e.key: e.size for e in engine.list()} == {n: i for i, n in enumerate(names)}
    assert {e.key for e in engine.list("run")} == {*names[:4]}
    assert {e.key for e in engine.list("run/")} == {*names[:3]}
    assert {e.key for e in engine.list("other/deep/")} == {"other/deep/er"}
    assert list(engine.list("nothing/")) == []
    assert all(e.modified > 1.6e9 for e in engine.list())
    engine.delete([*names[:3], "never/was"])
    engine.delete(["never/was"])
    assert {e.key for e in engine.list()} == {*names[3:]}


def test_many_threads_use_one_engine(engine: Engine) -> None:
    engine.put("a", DATA)
    wrong: list[object] = []

    def work(me: int) -> None:
        try:
            for i in range(5):
                asked = [Range("a", (me * 31 + i * 7 + j) % 2000, (me * 31 + i * 7 + j) % 2000 + 9) for j in range(12)]
                found = [bytes(d) for d in engine.get_ranges(asked)]
                if found != [DATA[a:b] for _, a, b in asked]:
                    wrong.append(me)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_replaced_objects_are_noticed_when_pinned(engine: Engine, request: pytest.FixtureRequest) -> None:
    if "obstore" not in repr(engine).lower():
        pytest.skip("fsspec and local files cannot ask for one version")
    engine.put("a", DATA)
    engine.pin(["a"])
    assert bytes(engine.get_ranges([Range("a", 1, 3)])[0]) == DATA[1:3]
    open_engine(engine.url, _options_of(engine)).put("a", DATA[::-1])
    with pytest.raises(CorruptStoreError, match="/a was replaced"):
        engine.get_ranges([Range("a", 1, 3)])


def _options_of(engine: Any) -> Any:
    cells = engine._build.__closure__
    return next(c.cell_contents for c in cells if isinstance(c.cell_contents, dict))


# -- conditional puts, probed ----------------------------------------------------------------
class Bucket:
    """A bucket whose conditions work, or do not."""

    def __init__(self, *, create: bool = True, update: bool = True, quoted: bool = True, tags: bool = True) -> None:
        self.create, self.update, self.quoted, self.tags = create, update, quoted, tags
        self.objects: dict[str, bytes] = {}
        self.ages: dict[str, float] = {}
        self.requests = 0

    def tag(self, key: str) -> str:
        text = f"{hash(self.objects[key]) & 0xFFFFFF:x}"
        return f'"{text}"'

    def put(self, key: str, data: Any, mode: Any) -> str | None:
        self.requests += 1
        if mode == "create" and self.create and key in self.objects:
            raise ConflictError("there already")
        if isinstance(mode, dict) and self.update:
            tag = self.tag(key)
            if mode["e_tag"] != (tag if self.quoted else tag.strip('"')):
                raise ConflictError("another tag")
        self.objects[key] = bytes(data)
        return self.tag(key) if self.tags else None

    def delete(self, keys: Any) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def list(self, prefix: str) -> list[Entry]:
        return [Entry(key, 1, self.ages.get(key, time.time())) for key in self.objects if key.startswith(prefix)]


@pytest.mark.parametrize(
    ("bucket", "works", "quoted"),
    [
        (Bucket(), True, True),
        (Bucket(quoted=False), True, False),
        (Bucket(create=False), False, True),
        (Bucket(update=False), False, True),
        (Bucket(tags=False), False, True),
    ],
    ids=["right", "tags without quotes", "ignores If-None-Match", "ignores If-Match", "no tags"],
)
def test_what_is_found_out_about_a_bucket(bucket: Bucket, works: bool, quoted: bool) -> None:
    where = name()
    found = conditional_puts.of(where, bucket.put, bucket.delete, bucket.list)
    assert found.works == works
    if works:
        assert found.quoted == quoted
    assert bucket.objects == {}
    before = bucket.requests
    assert conditional_puts.of(where, bucket.put, bucket.delete, bucket.list) == found
    assert bucket.requests == before, "asked twice"


def test_what_killed_processes_left_of_probes_is_swept() -> None:
    bucket = Bucket()
    old, young, other = conditional_puts.FOLDER + "old", conditional_puts.FOLDER + "young", "data/x"
    for key in (old, young, other):
        bucket.objects[key] = b"1"
    bucket.ages = {old: time.time() - 2 * conditional_puts.LEFT, other: 0.0}
    conditional_puts.of(name(), bucket.put, bucket.delete, bucket.list)
    assert sorted(bucket.objects) == [other, young]

    def refused(prefix: str) -> list[Entry]:
        raise StoreIOError("no permission to list")

    assert conditional_puts.of(name(), bucket.put, bucket.delete, refused).works


def test_a_sweep_in_the_middle_of_a_probe_is_no_answer() -> None:
    class Swept(Bucket):
        def put(self, key: str, data: Any, mode: Any) -> str | None:
            tag = super().put(key, data, mode)
            if self.requests == 1:
                del self.objects[key]
            return tag

    bucket = Swept()
    assert conditional_puts.of(name(), bucket.put, bucket.delete, bucket.list).works
    assert bucket.objects == {}


def test_a_bucket_that_cannot_says_so(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditional_puts, "of", lambda *_: conditional_puts.Conditions(False))
    with open_engine(f"{s3.url}/{name()}", s3.fsspec_options) as engine:
        assert not engine.conditional()
        with pytest.raises(UnsupportedError):
            engine.put("a", b"", if_absent=True)


# -- packages that are not there ------------------------------------------------------------
def test_reading_makes_one_client(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    client = obstore.store.S3Store
    monkeypatch.setattr(obstore.store, "S3Store", lambda bucket, **kw: made.append(bucket) or client(bucket, **kw))
    engine = open_engine(f"{s3.url}/{name()}", s3.fsspec_options)
    with pytest.raises(StoreNotFoundError):
        engine.get("x")
    assert len(made) == 1  # a client takes 10 ms of CPU
    engine.put("x", b"1")
    engine.put("y", b"2")
    assert len(made) == 2
    engine.close()


def test_a_missing_package_is_told() -> None:
    pytest.importorskip("fsspec")
    if importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    with pytest.raises(MissingDependencyError) as error:
        open_engine("simplecache::gs://bucket/x")
    assert "pip install 'gcsfs'" in str(error.value)


def test_obstore_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(MissingDependencyError, match="obstore") as error:
        open_engine("s3://bucket/x", {"anon": True})
    assert "pip install obstore" in str(error.value)


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (TimeoutError("too slow"), TransientError),
        (ConnectionResetError("reset by peer"), TransientError),
        (FileNotFoundError("no such archive"), StoreNotFoundError),
    ],
)
def test_a_wire_that_fails_while_opening_is_not_an_empty_place(
    monkeypatch: pytest.MonkeyPatch, error: Exception, ours: type[Exception]
) -> None:
    fsspec = pytest.importorskip("fsspec")

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(fsspec.core, "url_to_fs", fails)
    with pytest.raises(ours) as caught:
        open_engine(f"memory://{name()}/x")
    assert type(caught.value) is ours
