"""Transfer of an anonymous arena: a short message, from which the receiver opens the sender's descriptor.

No thread, no socket and no data. The receiver opens `/proc/<sender>/fd/<n>` and compares the arena's token.
The sender retains what it sent until the receiver has it, even if it drops the store right after `queue.put`:
each message names a cell of a small shared mailbox, in which the receiver writes a number.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import weakref
from collections import OrderedDict, deque
from typing import NamedTuple

from tdstore.builtin.shared.arena import Arena
from tdstore.errors import StoreError, StoreNotFoundError

_CELLS = 4096
_BOX_TOKEN = 16
_KNOWN_BOXES = 64


class Message(NamedTuple):
    """The location of an arena, and the mailbox cell that acknowledges it."""

    pid: int
    fd: int
    token: bytes
    writable: bool
    url: str
    box: int
    box_token: bytes
    cell: int
    number: int


class _Mailbox:
    """Cells of this process for acknowledgements."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.token = secrets.token_bytes(_BOX_TOKEN)
        self.fd = os.memfd_create("tdstore-mailbox", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _BOX_TOKEN + 4 * _CELLS)
        os.pwrite(self.fd, self.token, 0)
        self._memory = mmap.mmap(self.fd, 0)
        self.cells = memoryview(self._memory)[_BOX_TOKEN:].cast("I")
        self.free = list(range(_CELLS))
        weakref.finalize(self, os.close, self.fd)


class _Pending(NamedTuple):
    """An arena that was sent and not acknowledged."""

    box: _Mailbox
    cell: int
    number: int
    arena: Arena


_box: _Mailbox | None = None
_pending: deque[_Pending] = deque()
_numbers = itertools.count(secrets.randbits(31))
_boxes: OrderedDict[tuple[int, bytes], memoryview] = OrderedDict()
_arenas: weakref.WeakValueDictionary[tuple[bytes, bool], Arena] = weakref.WeakValueDictionary()


def remember(arena: Arena) -> Arena:
    """Register an arena, so that messages about it find it in this process."""
    _arenas[arena.token, arena.writable] = arena
    return arena


def send(arena: Arena) -> Message:
    """Build the message that transfers an arena, to be received once."""
    global _box
    collect()
    if _box is None or _box.pid != os.getpid() or not _box.free:
        if _box is not None and _box.pid != os.getpid():
            _pending.clear()  # a forked child: these were its parent's
        _box = _Mailbox()
    cell = _box.free.pop()
    number = next(_numbers) % 0xFFFFFFFF + 1
    _pending.append(_Pending(_box, cell, number, arena))
    return Message(os.getpid(), arena.fd, arena.token, arena.writable, arena.url, _box.fd, _box.token, cell, number)


def collect(limit: int = 8) -> None:
    """Release arenas that were received since; examines the oldest few, so that each call is short."""
    for _ in range(min(limit, len(_pending))):
        p = _pending.popleft()
        if p.box.cells[p.cell] == p.number:
            p.box.free.append(p.cell)
        else:
            _pending.append(p)


def receive(message: Message) -> Arena:
    """Return the arena of a message: the one this process has already, or a new mapping.

    Raises:
        StoreNotFoundError: the sender ended before.
    """
    arena = _arenas.get((message.token, message.writable))
    if arena is None:
        arena = _open(message)
    _answer(message)
    return arena


def _open(message: Message) -> Arena:
    gone = StoreNotFoundError(
        f"{message.url} cannot be received from process {message.pid}: it has ended, or received elsewhere it let go",
        url=message.url,
        hint="keep the sender running until its messages are received, or share under a name: shm://NAME",
    )
    try:
        # Not blocking, should the number mean a pipe by now.
        flags = (os.O_RDWR if message.writable else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(f"/proc/{message.pid}/fd/{message.fd}", flags)
    except PermissionError as error:
        raise StoreNotFoundError(
            f"{message.url} cannot be received: the system does not let this process open the files of {message.pid}",
            url=message.url,
            hint="run both as the same user in the same container, or share under a name: shm://NAME",
        ) from error
    except OSError as error:
        raise gone from error
    try:
        arena = Arena(fd, message.url, writable=message.writable)
    except StoreError as error:
        raise gone from error  # the number means another file by now
    if arena.token != message.token:
        raise gone
    return remember(arena)


def _answer(message: Message) -> None:
    if message.pid == os.getpid() and _box is not None and _box.token == message.box_token:
        _box.cells[message.cell] = message.number
        return
    key = (message.pid, message.box_token)
    cells = _boxes.get(key)
    if cells is None:
        try:
            fd = os.open(f"/proc/{message.pid}/fd/{message.box}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return  # the sender has ended: it keeps nothing
        try:
            if os.pread(fd, _BOX_TOKEN, 0) != message.box_token:
                return
            cells = memoryview(mmap.mmap(fd, 0))[_BOX_TOKEN:].cast("I")
        finally:
            os.close(fd)
        if len(_boxes) >= _KNOWN_BOXES:
            _boxes.popitem(last=False)
        _boxes[key] = cells
    cells[message.cell] = message.number
