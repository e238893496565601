"""The servers that the tests start, and each thing that the proxy before them does wrong when told."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from botocore.exceptions import ClientError
from obstore.exceptions import AlreadyExistsError, PreconditionError
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.servers import FaultProxy, MissingServer, Request, ServerFailed, http_nginx, redis_server
from tests.servers.faults import count_rounds
from tests.servers.process import Folder, Server, find_program, start
from tests.servers.rgw import PROGRAMS, available

ROOT = Path(__file__).resolve().parents[2]
DATA = bytes(range(256)) * 40


# -- processes -----------------------------------------------------------------------------
def test_a_missing_program_says_how_to_get_it():
    with pytest.raises(MissingServer, match="needs no-such-server: apt install it"):
        find_program("no-such-server", "apt install it")


def test_a_server_that_ends_shows_its_log(tmp_path):
    server = Server(["sh", "-c", "echo cannot find my teeth; exit 3"], tmp_path / "it.log")
    with pytest.raises(ServerFailed, match=r"(?s)ended with 3.*it\.log.*cannot find my teeth"):
        server.wait_until(lambda: False)


def test_a_server_that_does_not_answer_is_ended(tmp_path):
    server = Server(["sleep", "100"], tmp_path / "it.log")
    with pytest.raises(ServerFailed, match="no answer within 0.1 s"):
        server.wait_until(lambda: False, 0.1)
    assert not server.alive


def test_another_port_is_tried_where_the_first_is_taken():
    ports = []

    def attempt(port):
        ports.append(port)
        if len(ports) < 3:
            raise ServerFailed("bind: Address already in use")
        return port

    assert start(attempt) == ports[2]
    assert len(ports) == 3


def test_servers_end_when_their_process_is_killed():
    code = (
        "import os, time\nfrom tests.servers import redis_server\n"
        "with redis_server() as r:\n    print(r.pid, r.folder, flush=True)\n    time.sleep(100)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid, folder = child.stdout.readline().split()
    os.kill(int(pid), 0)
    child.kill()
    child.wait()
    child.stdout.close()
    until(lambda: not os.path.exists(folder))
    until(lambda: not runs(int(pid)))


def runs(pid: int) -> bool:
    """Whether a process is there and not a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(done, seconds=60):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_folder_is_removed():
    folder = Folder("test")
    (folder.path / "x").write_text("x")
    folder.remove()
    assert not folder.path.exists()


# -- redis ---------------------------------------------------------------------------------
def test_redis_answers(redis):
    with Redis.from_url(redis.url) as client:
        assert client.ping()


def test_redis_comes_back_with_and_without_its_data():
    for option, expected in (("yes", b"1"), ("no", None)):
        with redis_server(appendonly=option, appendfsync="always") as server, Redis.from_url(server.url) as client:
            client.set("a", 1)
            server.kill()
            with pytest.raises(RedisConnectionError):
                client.get("a")
            server.start()
            assert client.get("a") == expected
            server.restart()
            assert client.get("a") == expected


def test_a_paused_redis_says_nothing():
    with redis_server() as server, Redis.from_url(server.url, socket_timeout=1.0, retry=None) as client:
        client.set("a", 1)
        server.pause()
        with pytest.raises(RedisTimeoutError):
            client.get("a")
        server.resume()
        assert client.get("a") == b"1"


# -- object stores -------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["s3", "rgw", "azure"])
def test_an_object_store_keeps_objects(name, request):
    server = request.getfixturevalue(name)
    store = server.store("some/prefix")
    obstore.put(store, "x", DATA)
    assert bytes(obstore.get_range(store, "x", start=3, end=9)) == DATA[3:9]
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "x", b"other", mode="create")
    old = obstore.head(store, "x")["e_tag"]
    obstore.put(store, "x", b"new", mode={"e_tag": old}) if name != "rgw" else obstore.put(store, "x", b"new")
    if name != "rgw":
        with pytest.raises(PreconditionError):
            obstore.put(store, "x", b"newer", mode={"e_tag": old})
    assert obstore.get(store, "x").bytes() == b"new"
    fresh = server.make_container() if name == "azure" else server.make_bucket()
    assert obstore.list(fresh.store()).collect() == []


def test_rgw_compares_etags_without_quotes_only(rgw):
    """What a store must know: `If-Match` with the ETag as RGW itself gave it (quoted) never matches."""
    client = rgw.client()
    quoted = client.put_object(Bucket=rgw.bucket, Key="cas", Body=b"1")["ETag"]
    assert quoted.startswith('"')
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=rgw.bucket, Key="cas", Body=b"2", IfMatch=quoted)
    client.put_object(Bucket=rgw.bucket, Key="cas", Body=b"3", IfMatch=quoted.strip('"'))
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=rgw.bucket, Key="cas", Body=b"4", IfMatch=quoted.strip('"'))
    assert client.get_object(Bucket=rgw.bucket, Key="cas")["Body"].read() == b"3"


def test_one_of_many_creates_on_rgw_wins(rgw):
    client, together = rgw.client(), threading.Barrier(8)

    def create(number):
        together.wait()
        try:
            client.put_object(Bucket=rgw.bucket, Key="race", Body=b"%d" % number, IfNoneMatch="*")
        except ClientError as error:
            return error.response["ResponseMetadata"]["HTTPStatusCode"]
        return 200

    with ThreadPoolExecutor(8) as pool:
        statuses = sorted(pool.map(create, range(8)))
    assert statuses[0] == 200
    assert set(statuses[1:]) <= {409, 412}


def test_where_ceph_is_not_installed_rgw_says_so(monkeypatch):
    monkeypatch.setattr("tests.servers.rgw.PROGRAMS", (*PROGRAMS, "no-such-ceph"))
    assert available() == "needs no-such-ceph: apt install --no-install-recommends radosgw ceph-mon ceph-osd"


def test_the_last_user_of_a_shared_rgw_ends_it(rgw, tmp_path):
    """Two processes share one gateway of a folder of their own; it outlives the one that started it."""
    code = (
        "import sys\nfrom tests.servers import s3_rgw\nwith s3_rgw() as s:\n"
        "    print(s.port, s.make_bucket().bucket, flush=True)\n    sys.stdin.readline()"
    )
    env = {**os.environ, "TDSTORE_SERVERS_DIR": str(tmp_path / "run")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    users = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, **pipes) for _ in range(2)]
    ports = [int(user.stdout.readline().split()[0]) for user in users]
    assert ports[0] == ports[1] != rgw.port
    users[0].kill()
    users[0].communicate()
    again = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, **pipes)
    assert int(again.stdout.readline().split()[0]) == ports[0]
    for user in (users[1], again):
        user.communicate("\n")
        assert user.returncode == 0
    until(lambda: not (tmp_path / "run").exists())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]))


# -- files by http -------------------------------------------------------------------------
class Client:
    """One connection, and the answers as (status, body)."""

    def __init__(self, port, timeout=10):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)

    def __call__(self, method, path, body=None, **headers):
        self.connection.request(method, path, body, headers)
        self.answer = self.connection.getresponse()
        return self.answer.status, self.answer.read()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.connection.close()


def test_nginx_serves_ranges_and_counts(http):
    (http.folder / "counted").write_bytes(DATA)
    http.reset()
    with Client(http.port) as ask:
        assert ask("GET", "/counted", Range="bytes=2-4") == (206, DATA[2:5])
        assert ask("GET", "/counted", Range="bytes=-4") == (206, DATA[-4:])
        assert ask("GET", "/not-there")[0] == 404
        assert ask("PUT", "/counted", b"no")[0] == 403
    hits = [(h.method, h.path, h.range, h.status) for h in http.requests()]
    assert hits == [
        ("GET", "/counted", "bytes=2-4", 206),
        ("GET", "/counted", "bytes=-4", 206),
        ("GET", "/not-there", "", 404),
        ("PUT", "/counted", "", 403),
    ]
    http.reset()
    assert http.requests() == []


def test_nginx_can_ask_for_a_password_list_and_ignore_ranges(tmp_path, http):
    (tmp_path / "f").write_bytes(DATA)
    with http_nginx(tmp_path, autoindex="json", auth=("me", "pw"), ranges=False) as web, Client(web.port) as ask:
        assert ask("GET", "/f")[0] == 401
        assert ask("GET", "/f", Range="bytes=2-4", **web.auth_header) == (200, DATA)
        assert b'"name":"f"' in ask("GET", "/", **web.auth_header)[1]


# -- the proxy -----------------------------------------------------------------------------
@pytest.fixture
def web(http):
    (http.folder / "data").write_bytes(DATA)
    (http.folder / "empty").write_bytes(b"")
    return http


@pytest.fixture
def proxy(web):
    with FaultProxy(web.port) as proxy:
        yield proxy


@pytest.fixture
def ask(proxy):
    with Client(proxy.port) as client:
        yield client


def test_without_faults_it_changes_nothing(proxy, ask):
    for _ in range(3):
        assert ask("GET", "/data") == (200, DATA)
        assert ask("GET", "/empty") == (200, b"")
        assert ask("HEAD", "/data") == (200, b"")
        assert ask("GET", "/data", Range="bytes=5-9") == (206, DATA[5:10])
    assert proxy.connections == 1
    assert [(r.method, r.path, r.range, r.status, r.sent) for r in proxy.requests[-2:]] == [
        ("HEAD", "/data", "", 200, 0),
        ("GET", "/data", "bytes=5-9", 206, 5),
    ]
    assert proxy.bytes_sent == 3 * (len(DATA) + 5)
    assert proxy.rounds() == 12
    proxy.forget()
    assert proxy.requests == []


def test_it_answers_for_the_server(proxy, ask, web):
    web.reset()
    fault = proxy.answer(503, retry_after=2, path="^/data", nth=2)
    assert ask("GET", "/data") == (200, DATA)
    assert ask("GET", "/empty") == (200, b"")
    assert ask("GET", "/data")[0] == 503
    assert ask.answer.headers["Retry-After"] == "2"
    assert ask("GET", "/data") == (200, DATA)
    assert fault.hits == 1
    assert len(web.requests()) == 3
    proxy.clear()
    proxy.answer(429, every=3, method="HEAD|GET")
    assert [ask("GET", "/data")[0] for _ in range(6)] == [200, 200, 429] * 2
    proxy.clear()
    proxy.answer(404, times=2)
    assert [ask("HEAD", "/data")[0] for _ in range(3)] == [404, 404, 200]


def test_it_resets_in_mid_body(proxy, ask):
    proxy.reset(after=1000, path="data", times=1)
    with pytest.raises(ConnectionResetError):
        ask("GET", "/data")
    assert proxy.requests[0].sent == 1000
    ask.connection.close()
    assert ask("GET", "/data") == (200, DATA)


def test_what_came_before_a_reset_arrives(proxy):
    proxy.reset(after=1000)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as raw:
        raw.sendall(b"GET /data HTTP/1.1\r\nHost: x\r\n\r\n")
        got = b""
        with pytest.raises(ConnectionResetError):
            while piece := raw.recv(100):
                got += piece
    assert got.partition(b"\r\n\r\n")[2] == DATA[:1000]


def test_it_sends_a_short_body(proxy, ask):
    proxy.short(7, times=1)
    with pytest.raises(http.client.IncompleteRead) as short:
        ask("GET", "/data")
    assert short.value.partial == DATA[:7]
    assert short.value.expected == len(DATA) - 7
    ask.connection.close()
    assert ask("GET", "/data") == (200, DATA)


def test_it_flips_a_byte(proxy, ask):
    proxy.flip(300, path="data")
    assert ask("GET", "/data") == (200, DATA[:300] + bytes([DATA[300] ^ 0xFF]) + DATA[301:])


def test_it_repeats_a_stale_answer(proxy, ask, web):
    (web.folder / "changing").write_bytes(b"one")
    assert ask("GET", "/changing") == (200, b"one")
    (web.folder / "changing").write_bytes(b"three")
    assert ask("GET", "/changing") == (200, b"three")
    fault = proxy.stale(path="changing")
    (web.folder / "changing").write_bytes(b"four")
    assert ask("GET", "/changing") == (200, b"three")
    assert ask("GET", "/changing", Range="bytes=0-1") == (206, b"fo")  # nothing old of that range is known
    assert fault.hits == 2
    proxy.clear()
    assert ask("GET", "/changing") == (200, b"four")


@pytest.mark.parametrize("after", [None, 0, 500])
def test_it_stalls(proxy, after):
    proxy.stall(after)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=1.0) as raw:
        raw.sendall(b"GET /data HTTP/1.1\r\nHost: x\r\n\r\n")
        got = b""
        with pytest.raises(TimeoutError):
            while piece := raw.recv(65536):
                got += piece
    assert got.partition(b"\r\n\r\n")[2] == DATA[: after or 0]
    assert bool(got) == (after is not None)


def test_it_drops_the_acknowledgement(s3):
    with FaultProxy(s3.port) as proxy:
        client = s3.through(proxy.port).client()
        fault = proxy.drop_ack(method="PUT", path="lost")
        with pytest.raises(Exception, match="Connection was closed|reset"):
            client.put_object(Bucket=s3.bucket, Key="lost", Body=b"x" * 100_000)
        assert fault.hits == 1
        assert client.get_object(Bucket=s3.bucket, Key="lost")["Body"].read() == b"x" * 100_000


@pytest.mark.parametrize("name", ["s3", "rgw", "azure"])
def test_object_stores_work_through_it(name, request):
    server = request.getfixturevalue(name)
    with FaultProxy(server.port, latency_ms=5) as proxy:
        store = server.through(proxy.port).store("proxied")
        big = os.urandom(3 << 20)
        obstore.put(store, "big", big)
        assert obstore.get(store, "big").bytes() == big
        with pytest.raises(AlreadyExistsError):
            obstore.put(store, "big", b"", mode="create")
        proxy.forget()
        obstore.get_ranges(store, "big", starts=[0, 2 << 20], ends=[10, (2 << 20) + 10], coalesce=0)
        assert sorted(r.range for r in proxy.requests) == ["bytes=0-9", "bytes=2097152-2097161"]
        assert proxy.bytes_sent == 20


def test_a_request_costs_its_latency_once(proxy, ask):
    ask("GET", "/data")
    proxy.latency_ms = 150
    before = time.monotonic()
    ask("GET", "/data")
    assert time.monotonic() - before >= 0.15
    request = proxy.requests[-1]
    # The proxy notes the end after it has sent the last byte, so the client may be here first.
    until(lambda: request.end)
    assert 0.15 <= request.end - request.start


def test_its_bandwidth_is_shared(proxy, web):
    proxy.bandwidth = len(DATA) * 10
    before = time.monotonic()

    def one(_):
        with Client(proxy.port) as ask:
            return ask("GET", "/data")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == [(200, DATA)] * 4
    assert time.monotonic() - before >= 0.4


def test_it_counts_rounds(proxy, web):
    proxy.latency_ms = 200

    def one(path):
        with Client(proxy.port) as ask:
            return ask("GET", path)[0]

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(one, ["/data"] * 4)) == {200}
        assert set(pool.map(one, ["/data"] * 4)) == {200}
    assert one("/empty") == 200
    assert proxy.rounds() == 3


def test_rounds_are_the_longest_chain():
    def spans(*pairs):
        return [Request("GET", "/", start=a, end=b) for a, b in pairs]

    assert count_rounds([]) == 0
    assert count_rounds(spans((1, 9), (2, 3), (3, 4), (4, 8))) == 3
    assert count_rounds(spans((0, 10), (5, 15), (12, 20))) == 2
    assert count_rounds(spans((0, 1), (5, 0), (6, 0))) == 2, "those that have not ended overlap"


def test_it_can_refuse_and_cut(proxy, ask, web):
    assert ask("GET", "/data") == (200, DATA)
    proxy.cut()
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask("GET", "/data")
    ask.connection.close()
    proxy.refuse()
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask("GET", "/data")
    ask.connection.close()
    proxy.refuse(False)
    assert ask("GET", "/data") == (200, DATA)


# -- the proxy before redis ----------------------------------------------------------------
@pytest.fixture
def raw(redis):
    with FaultProxy(redis.port, raw=True) as proxy:
        yield proxy


@pytest.fixture
def through(raw):
    with Redis(port=raw.port, socket_timeout=5, retry=None, protocol=2) as client:
        client.set("big", DATA)
        yield client


def test_raw_passes_everything(raw, through):
    assert through.get("big") == DATA
    assert raw.bytes_sent > len(DATA)
    assert raw.connections == 1


def test_raw_drops_what_redis_answers_to_a_write(raw, through, redis):
    fault = raw.reset(0, times=1)
    with pytest.raises(RedisConnectionError):
        through.incr("lost")
    assert fault.hits == 1
    with Redis.from_url(redis.url) as direct:
        assert direct.getdel("lost") == b"1"


def test_raw_cuts_after_some_bytes(raw, through):
    fault = raw.reset(1000, times=1)
    with pytest.raises(RedisConnectionError):
        through.get("big")
    assert fault.hits == 1
    assert through.get("big") == DATA


def test_raw_stalls(raw, redis):
    with Redis(port=raw.port, socket_timeout=1.0, retry=None, protocol=2) as client:
        client.ping()
        raw.stall(10, times=1)
        client.ping()  # 7 bytes
        with pytest.raises(RedisTimeoutError):
            client.ping()
        assert client.ping()


def test_raw_knows_no_answers(raw):
    with pytest.raises(ValueError, match="answer is for HTTP"):
        raw.answer(503)


def test_a_dead_redis_behind_it_is_seen():
    with redis_server() as server, FaultProxy(server.port, raw=True) as proxy:
        with Redis(port=proxy.port, retry=None) as client:
            client.ping()
            server.kill()
            with pytest.raises(RedisConnectionError):
                client.ping()
            with pytest.raises(RedisConnectionError):
                client.ping()
            server.start()
            assert client.ping()
