"""A dataset on a redis server: ours, the peer's `TensorDictStore` and a floor, on one server in one run.

Run `python benchmarks/redis_server.py` (about a minute; needs `redis-server`), `--quick` for smaller data. The
floor is hiredis and packed commands on raw strings, one per leaf, without checksums.
"""

from __future__ import annotations

import itertools
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import hiredis
import numpy as np
import torch
from _harness import FLOOR, OURS, PEER, Bench, Target, modules

BATCH = 256
# SPEED.md section 6, "goal (solid)"; it has none for writing, where checksums and a transaction come on top.
TARGETS = [Target("redis rows", 3.0), Target("redis slice", 1.8), Target("redis write", 1.0)]


class Server:
    """A redis of our own on a free port, with nothing on disk."""

    def __init__(self, program: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="tdstore-bench-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self.folder]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError("redis-server did not start")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


class Raw:
    """Packed commands, parsed replies, nothing else."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader, self.buffer = hiredis.Reader(), bytearray(1 << 20)

    def __call__(self, commands: list[bytes]) -> list[Any]:
        self.socket.sendall(b"".join(commands))
        replies: list[Any] = []
        while len(replies) < len(commands):
            size = self.socket.recv_into(self.buffer)
            self.reader.feed(self.buffer, 0, size)  # type: ignore[arg-type]
            while (reply := self.reader.gets()) is not False:
                replies.append(reply)
        return replies


def packed(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(p), p) for p in parts])


def part(key: str, start: int, stop: int) -> bytes:
    return packed(b"GETRANGE", key.encode(), b"%d" % start, b"%d" % (stop - 1))


def datasets(quick: bool) -> dict[str, dict[str, torch.Tensor]]:
    rng = np.random.default_rng(1)
    n, m = (2_000, 1_000) if quick else (10_000, 4_000)
    obs = torch.from_numpy(rng.integers(0, 255, (m, 84, 84), dtype=np.uint8))
    return {
        "5 keys x 64 f32": {f"k{i}": torch.randn(n, 64) for i in range(5)},
        "24 keys x 8 f32": {f"k{i}": torch.randn(n, 8) for i in range(24)},
        "frames + 2 scalars": {"obs": obs, "action": torch.arange(m), "reward": torch.rand(m)},
    }


def measure(bench: Bench, server: Server, name: str, data: dict[str, torch.Tensor]) -> None:
    n = len(next(iter(data.values())))
    rng = np.random.default_rng(0)
    drawn = itertools.cycle([torch.from_numpy(rng.integers(0, n, BATCH)) for _ in range(64)])
    call = Raw(server.port)
    call([packed(b"FLUSHALL")])
    call([packed(b"SET", f"raw:{key}".encode(), value.numpy().tobytes()) for key, value in data.items()])
    found = modules()
    opened: dict[str, Any] = {}
    if PEER in found and bench.has(PEER):
        store = found[PEER].TensorDictStore  # type: ignore[attr-defined]
        td = found[PEER].TensorDict(data, [n])  # type: ignore[attr-defined]
        opened[PEER] = store.from_tensordict(td, host="127.0.0.1", port=server.port)
    if OURS in found and bench.has(OURS):
        url = f"redis://127.0.0.1:{server.port}/0/bench"
        found[OURS].TensorDict(data, [n]).save(url).close()  # type: ignore[attr-defined]
        opened[OURS] = found[OURS].open(url, mode="r+")  # type: ignore[attr-defined]
    size = {key: value[0].nbytes for key, value in data.items()}

    def each(run: Callable[[Any], object]) -> dict[str, Callable[[], object]]:
        return {who: lambda td=td: run(td) for who, td in opened.items()}

    def ranges(starts: list[int], rows: int) -> Callable[[], object]:
        return lambda: call([part(f"raw:{k}", at * size[k], (at + rows) * size[k]) for k in data for at in starts])

    def random_floor() -> object:
        return ranges(next(drawn).tolist(), 1)()

    middle, key = n // 2, next(iter(data))
    some = slice(middle, middle + BATCH)
    block = {k: v[:BATCH].clone() for k, v in data.items()}
    kinds = {who: found[who].TensorDict(block, [BATCH]) for who in opened}  # type: ignore[attr-defined]

    def write(index: Callable[[], Any]) -> dict[str, Callable[[], object]]:
        return {who: lambda who=who: opened[who].__setitem__(index(), kinds[who]) for who in opened}

    def write_floor() -> object:
        at = {k: b"%d" % (middle * size[k]) for k in data}
        return call([packed(b"SETRANGE", f"raw:{k}".encode(), at[k], v.numpy().tobytes()) for k, v in block.items()])

    io = bench.io
    io(
        "redis rows",
        f"{BATCH} random rows, {name}",
        {**each(lambda t: t[next(drawn)].to_tensordict()), FLOOR: random_floor},
    )
    io(
        "redis slice",
        f"{BATCH} rows, {name}",
        {**each(lambda t: t[some].to_tensordict()), FLOOR: ranges([middle], BATCH)},
    )
    io("redis one row", f"one row, {name}", {**each(lambda t: t[7].to_tensordict()), FLOOR: ranges([7], 1)})
    io(
        "redis leaf",
        f"one whole leaf, {name}",
        {**each(lambda t: t[key]), FLOOR: lambda: call([packed(b"GET", f"raw:{key}".encode())])},
    )
    io("redis all", f"everything, {name}", {**each(lambda t: t.to_tensordict()), FLOOR: ranges([0], n)})
    io("redis write", f"slice of {BATCH} rows, {name}", {**write(lambda: some), FLOOR: write_floor})
    io("redis write rows", f"{BATCH} random rows, {name}", write(lambda: next(drawn)))
    fresh = itertools.count()

    def save(who: str) -> Callable[[], object]:
        td = found[who].TensorDict(data, [n])  # type: ignore[attr-defined]
        if who == OURS:
            return lambda: td.save(f"redis://127.0.0.1:{server.port}/1/save{next(fresh)}").close()
        return lambda: found[PEER].TensorDictStore.from_tensordict(td, host="127.0.0.1", port=server.port, db=1)  # type: ignore[attr-defined]

    empty = Raw(server.port)
    empty([packed(b"SELECT", b"1")])
    io("redis save", name, {who: save(who) for who in opened}, tidy=lambda: empty([packed(b"FLUSHDB")]))
    for td in opened.values():
        td.close()


def client(bench: Bench, server: Server) -> None:
    """The commands of one batch through our connection, beside redis-py's pipeline and redis-py's connection."""
    import redis
    from tdstore_redis.address import Address
    from tdstore_redis.connection import Wire, pack

    count, size = 1_280, 256
    raw, address = Raw(server.port), Address("127.0.0.1", server.port, 0, "client", "redis://127.0.0.1")
    raw([packed(b"SET", b"client", bytes(count * size))])
    starts = np.random.default_rng(0).permutation(count).tolist()
    ranges = [(at * size, (at + 1) * size - 1) for at in starts]
    wire, theirs = Wire(address, timeout=10.0, tls=None), redis.Redis(port=server.port)
    connection = theirs.connection_pool.get_connection()

    def commands() -> list[bytes]:
        return [pack(b"GETRANGE", b"client", b"%d" % start, b"%d" % stop) for start, stop in ranges]

    def pipeline() -> object:
        pipe = theirs.pipeline(transaction=False)
        for start, stop in ranges:
            pipe.getrange("client", start, stop)
        return pipe.execute()

    def on_connection() -> object:
        connection.send_packed_command([b"".join(commands())], check_health=False)
        return [connection.read_response() for _ in ranges]

    runs = {OURS: lambda: wire.raising(commands()), FLOOR: lambda: raw(commands())}
    assert wire.raising(commands()) == pipeline() == on_connection()
    bench.io("redis client", f"{count} GETRANGE; peer: redis-py's pipeline", {**runs, PEER: pipeline})
    bench.io("redis client", f"{count} GETRANGE; peer: redis-py's connection", {**runs, PEER: on_connection})
    wire.close()
    theirs.close()


def main() -> int:
    program = shutil.which("redis-server")
    if program is None:
        print("redis-server is not installed: nothing to measure (apt install redis-server)", file=sys.stderr)
        return 0
    bench = Bench("A dataset on a redis server (wall time per call)", TARGETS)
    server = Server(program)
    try:
        client(bench, server)
        for name, data in datasets(bench.quick).items():
            measure(bench, server, name, data)
    finally:
        server.stop()
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
