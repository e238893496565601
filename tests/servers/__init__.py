"""Real servers on loopback, for tests, the demo and benchmarks. Each is a context manager; none needs pytest.

    from tests.servers import redis_server, s3_moto, ...       # found everywhere by pytest's `pythonpath = ["."]`;
    # a script first says: sys.path.insert(0, str(Path(__file__).resolve().parents[1]))   the repository's root

    with redis_server(appendonly="yes") as r:   r.url, r.port; r.restart(), r.kill() + r.start(), r.pause(), r.resume()
    with s3_moto() as s:     s.bucket, s.endpoint, s.env, s.store("prefix"), s.client(), s.make_bucket().bucket
    with s3_rgw() as s:      the same on a real Ceph, one for all processes of the run (the first user waits 2 to 7 s)
    with azurite() as a:     a.container, a.endpoint, a.env, a.store("prefix"), a.make_container().container
    with http_nginx(folder, autoindex="json", auth=("me", "pw"), ranges=True) as w:   w.url, w.requests(), w.reset()
    with FaultProxy(s.port, latency_ms=20) as p:     t = s.through(p.port), a server seen through the proxy; then
        p.answer(503, retry_after=1, method="PUT", path="manifest", nth=2)   or reset(after=9), short(9), stall(9),
        flip(9), stale(), drop_ack() with the same keywords and every=, times=; p.clear(), p.cut(), p.refuse(); and
        p.requests, p.bytes_sent, p.rounds(), p.forget(); p.latency_ms = 50.   redis: FaultProxy(r.port, raw=True)

Fixtures in the root conftest.py, one of each for a worker: `redis`, `s3` (moto), `rgw`, `azure`, `http` (`http.folder`
is what it serves); and `pyright`, no server, but a program that may be missing as well. Start one of your own to
stop, freeze or kill it. `python -m tests.servers rgw azurite` runs some until Ctrl-C and prints their settings.

A program that is not installed raises MissingServer: the fixtures then skip the test by name, or fail it where
TDSTORE_REQUIRE_SERVERS=1 (`.ci/run`). A server that does not start raises ServerFailed, with the end of its log.
Every server has its own port and folder, and ends with its context, also when this process is killed.
"""

from tests.servers.azure import AzureServer, azurite
from tests.servers.checkers import pyright
from tests.servers.faults import Fault, Request
from tests.servers.process import MissingServer, ServerFailed
from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer, redis_server
from tests.servers.rgw import s3_rgw
from tests.servers.s3 import S3Server, s3_moto
from tests.servers.web import WebServer, http_nginx

__all__ = [
    "AzureServer",
    "Fault",
    "FaultProxy",
    "MissingServer",
    "RedisServer",
    "Request",
    "S3Server",
    "ServerFailed",
    "WebServer",
    "azurite",
    "http_nginx",
    "pyright",
    "redis_server",
    "s3_moto",
    "s3_rgw",
]
