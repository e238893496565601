"""Cells and their checks, without a server; and replies as a server should not send them."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tdstore_redis.address import parse
from tdstore_redis.cells import layout
from tdstore_redis.cells.layout import Array, Bytes, new_array
from tdstore_redis.cells.plans import Run
from tdstore_redis.connection import Wire
from tdstore_redis.faults import Lost, ServerError

from tdstore.types import LeafSpec


def stored(array: Array, seed: int = 0) -> Bytes:
    """All cells of an array, with random content and their checks."""
    made = np.random.default_rng(seed).integers(0, 256, (array.cells, array.stride), dtype=np.uint8)
    array.seal(range(array.cells), made)
    return made


@pytest.fixture(params=["tables", "computed"])
def array(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Array:
    if request.param == "computed":
        monkeypatch.setattr(layout, "_TABLE", 0)
    return new_array(LeafSpec((19, 70), "int64"), 3, "ab" * 8)


def test_any_run_of_cells_is_checked_at_once(array: Array) -> None:
    cells = stored(array)
    again = cells.copy()
    array.seal(np.arange(array.cells), again)
    assert (again == cells).all()
    assert (array.marks(np.arange(array.cells + 1)) == [array.mark(i) for i in range(array.cells + 1)]).all()
    for first, stop in itertools.combinations(range(array.cells + 1), 2):
        assert array.fits(first, stop, cells[first:stop])
        assert array.fits(first, stop, cells[first:stop].tobytes())


def test_damage_in_a_run_is_told_and_found(array: Array) -> None:
    cells = stored(array)
    other = stored(new_array(LeafSpec((19, 70), "int64"), 4, "ab" * 8), 1)
    for at in range(array.cells):
        for byte in (0, array.cell - 1, array.cell, array.stride - 1):
            bad = cells.copy()
            bad[at, byte] ^= 1 << at % 8
            assert not array.fits(0, array.cells, bad)
            assert array.wrong(range(array.cells), bad).tolist() == [at]
    whole = range(array.cells)
    for kind, bad in {
        "swapped": cells[[1, 0, *whole[2:]]],
        "turned round": cells[::-1].copy(),
        "one twice": cells[[0, 0, *whole[2:]]],
        "of another leaf": other,
        "one of another leaf": np.concatenate((cells[:5], other[5:6], cells[6:])),
        "zeros": np.zeros_like(cells),
        "one never written": np.concatenate((cells[:5], cells[5:6] * 0, cells[6:])),
    }.items():
        assert not array.fits(0, array.cells, bad), kind
        assert len(array.wrong(whole, bad)), kind
    assert not array.fits(1, 4, cells[2:5])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_wanted_bytes_of_a_run_are_put_in_their_places(data: st.DataObject) -> None:
    array = new_array(LeafSpec((40, 5), "uint8"), 1, "ab" * 8, cell=20)
    lo = data.draw(st.integers(0, 199))
    hi = data.draw(st.integers(lo + 1, 200))
    first, stop = lo // 20, -(-hi // 20)
    cells = stored(array)
    into = np.zeros(hi - lo, np.uint8)
    run = Run((), array, first, stop, into, lo - first * 20)
    cuts = sorted({first, stop, *data.draw(st.lists(st.integers(first, stop), max_size=3))})
    for a, b in itertools.pairwise(cuts):
        run.put(a, b, cells[a:b])
    assert (into == cells[:, :20].reshape(-1)[lo:hi]).all()


# -- replies ------------------------------------------------------------------------------


def serve(listener: socket.socket, pieces: list[bytes]) -> None:
    peer, _ = listener.accept()
    with peer:
        peer.recv(4096)
        peer.sendall(b"+PONG\r\n")
        for piece in pieces:
            peer.recv(1)
            peer.sendall(piece)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(4096):
            pass


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def strings(listener: socket.socket, reply: bytes, sizes: list[int], step: int, ok: int = 0) -> list[bytes]:
    """What `Wire.strings` makes of a reply that comes in pieces of `step` bytes."""
    pieces = [reply[at : at + step] for at in range(0, len(reply), step)]
    server = Thread(target=serve, args=(listener, pieces))
    server.start()
    port = listener.getsockname()[1]
    wire = Wire(parse(f"redis://127.0.0.1:{port}/0/x", {}, new=False), timeout=5, tls=None)
    found: dict[int, bytes] = {}
    try:
        asked = [b"x" * len(pieces)] * len(sizes)  # the server sends a piece for each byte
        wire.strings(asked, sizes, lambda i, raw: found.__setitem__(i, raw.tobytes()), [b"w"] * ok)
    finally:
        broken = wire.broken
        wire.close()
        server.join()
    assert not broken
    return [found.get(i, b"-") for i in range(len(sizes))]


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_strings_in_any_pieces(listener: socket.socket, step: int) -> None:
    """Whole ones, short and empty ones, and an answer to what was sent before."""
    reply = b"+OK\r\n$5\r\nhe\r\no\r\n$0\r\n\r\n$2\r\n\r\n\r\n$100\r\n" + bytes(100) + b"\r\n"
    assert strings(listener, reply, [5, 5, 3, 100], step, 1) == [b"he\r\no", b"", b"\r\n", bytes(100)]


def test_an_error_among_strings_is_raised_after_all_were_read(listener: socket.socket) -> None:
    with pytest.raises(ServerError, match="WRONGTYPE no") as caught:
        strings(listener, b"$1\r\na\r\n-WRONGTYPE no\r\n-OTHER\r\n$1\r\nb\r\n", [1, 1, 1, 1], 9)
    assert caught.value.code == "WRONGTYPE"


@pytest.mark.parametrize(
    "reply",
    [b"$6\r\nabcdef\r\n", b"$-1\r\n", b"$x\r\n", b"+OK\r\n", b":3\r\n", b"*1\r\n$1\r\na\r\n", b"$5\r\nabcdefg"]
    + [b"$5\r\nabcde\r\n$5\r\nabcde\r\n", b"$5\r\nabc", b"", b"$1", b"\x00" * 9000, b"$" + b"1" * 9000],
)  # fmt: skip
def test_replies_that_cannot_be_right(listener: socket.socket, reply: bytes) -> None:
    with pytest.raises(Lost):
        strings(listener, reply, [5], 10_000)


def test_a_string_larger_than_the_buffer(listener: socket.socket) -> None:
    body = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8).tobytes()
    reply = b"$3\r\nabc\r\n" + b"$%d\r\n%b\r\n" % (len(body), body)
    assert strings(listener, reply, [3, len(body)], 1_000_003) == [b"abc", body]
