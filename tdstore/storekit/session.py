"""Writers: what is kept when one ends, for every backend, and the log by which a folder shows that one was killed.

**The commit policy.** A backend says what its writer has (`WriterState`) and how each step is done (`WriterSteps`);
this module decides which steps are done, and in which order:

===================================== ====================================================================
of a reader, or of a forked child     nothing is committed or removed; its own descriptors are released
closed before the first commit        what was built is removed
place replaced, or connection lost    nothing is committed
rows written, the structure unchanged they are committed, under the header of the last commit
the structure being changed           it returns to the last commit; the rows of its leaves are committed
a commit that is refused              back to the last commit; the error is raised, and all is released, or the
                                      store stays open (tdz, whose rows are in memory: `close` can be called again)
===================================== ====================================================================

The same holds for `close`, the end of a `with` block, garbage collection and the end of the process, which all close
the store (`lifetime`), and, for rows alone, when another process is about to open the location.

**Sessions on a folder.** Each store opened "r+" has one, so that a crash is detected and other writers wait or get an
error. Liveness is a shared flock on the root folder, which ends with its process. The history is in the log
`tdstore.session`, one JSON line per event, which exists only during a session (or after a writer was killed):

    {"open": id, "pid": 1, "host": "h"}          a session began
    {"leave": id, "touched": [path, ...] | null} it ended in order; these leaves (null: any) have stale sums
    {"intent": {"add": [...], "drop": [...]}}    a commit begins that adds and removes these files

Lock order: the parent folder, then the root. A session begins and another process replaces the folder only under the
parent's lock, so neither can miss the other.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import msgspec

from tdstore.errors import CorruptStoreError, StoreError, TDStoreError
from tdstore.lifetime import LiveObjects
from tdstore.storekit import files, refusals
from tdstore.types import Path

NAME = "tdstore.session"
MAX_LOG = 64 << 20
_LONG_LOG = 4 << 10
"""Bytes of a log from which on a session that ends rewrites it without those that ended before."""
LOCK_TIMEOUT = 10.0

FileParts = tuple[str, ...]


# -- the commit policy --------------------------------------------------------------------
class WriterState(NamedTuple):
    """The state of a writer, which the commit policy reads."""

    pid: int
    """The process that opened the store."""
    writable: bool
    """Whether it was opened for writing."""
    published: bool
    """False until the first commit of a new store."""
    structure: bool = False
    """Whether leaves were made, removed, renamed or resized since the last commit."""
    rows: bool = False
    """Whether rows of committed leaves were written since, or accepted as a dead writer left them; True where only
    `commit_rows` can tell."""
    lost: bool = False
    """Whether nothing can be committed any more: the place was replaced, or its connection lost."""


class WriterSteps(Protocol):
    """The steps of a writer. The commit policy calls them; a backend itself calls none of them when it ends."""

    def state(self) -> WriterState:
        """Return the state of the writer: what there is to commit."""

    def drop_structure(self) -> None:
        """Return to the leaves of the last commit, with the rows that were written into them since."""

    def commit_rows(self) -> None:
        """Commit the written rows (`state().rows`), under the header of the last commit."""

    def unmark(self) -> None:
        """Let others write, because there is nothing to commit."""

    def take_back(self) -> None:
        """Return to the last commit after a refused one, as far as the storage can be reached."""

    def remove_uncommitted(self) -> None:
        """Remove from the storage what no commit names: data built for the first commit, or for a refused one."""

    def release(self) -> None:
        """Release locks, descriptors, connections and memory."""


def end_writer(
    steps: WriterSteps, *, keep: bool = True, stay_open: type[TDStoreError] | tuple[type[TDStoreError], ...] = ()
) -> None:
    """End a store: commit what is kept, remove the rest, and release everything.

    Args:
        steps: the store.
        keep: False drops all changes, as after a failed opening.
        stay_open: errors of the commit after which nothing is released, so that ending it can be tried again.

    Raises:
        TDStoreError: from `commit_rows` or another step. Everything is released nevertheless, `stay_open` aside.

    Example:
        >>> from tdstore.storekit import end_writer
        >>> end_writer(session)  # doctest: +SKIP
    """
    mine = False
    release = True
    try:
        state = steps.state()
        mine = state.writable and state.pid == os.getpid()
        if keep and mine and state.published and not state.lost:
            try:
                _commit_rows(steps, state)
            except BaseException:
                with suppress(StoreError):
                    steps.take_back()
                raise
    except stay_open:
        release = False
        raise
    finally:
        try:
            if mine and release:
                steps.remove_uncommitted()
        finally:
            if release:
                steps.release()


def commit_for_readers(steps: WriterSteps) -> bool:
    """Commit written rows, because others are about to open the location. A change of structure waits for its header.

    Args:
        steps: the store.

    Returns:
        False if nothing was committed because the structure is being changed.
    """
    state = steps.state()
    if state.structure:
        return False
    if state.published:
        _commit_rows(steps, state)
    return True


def _commit_rows(steps: WriterSteps, state: WriterState) -> None:
    if state.structure:
        steps.drop_structure()
        state = steps.state()
    if state.rows:
        steps.commit_rows()
    else:
        steps.unmark()


def accept_dirty(
    url: str,
    named: Sequence[Path],
    *,
    accept: bool,
    damaged: Callable[[], Iterable[Path]] | None = None,
    writer: str = "a writer",
    hint: str | None = None,
) -> bool:
    """Decide about the leaves that a dead writer was writing, when a store is opened.

    Args:
        url: the location, for messages.
        named: the leaves that its marker names.
        accept: whether the caller accepts them as they are (`recover="accept"`).
        damaged: returns those whose data is neither that from before nor that from after the write; None: all of them.
        writer: a description of the writer, for messages.
        hint: what to do, if that is not what `refusals.dirty` says.

    Returns:
        True if leaves are to be accepted as they are, and to become the next commit.

    Raises:
        DirtyStoreError: not accepted, and leaves are half written.

    Example:
        >>> accept_dirty("runs/1", [("obs",)], accept=False, damaged=list)
        False
    """
    if accept or not named:
        return accept
    bad = list(named if damaged is None else damaged())
    if bad:
        raise refusals.dirty(url, bad, writer=writer, hint=hint)
    return False


# -- sessions on a folder -----------------------------------------------------------------
class Log(msgspec.Struct):
    """The contents of a session log."""

    opened: dict[str, dict[str, object]] = msgspec.field(default_factory=dict)
    """Session id -> its first event, for those that have not left."""
    own: set[str] = msgspec.field(default_factory=set)
    """Of these, the ones of this process."""
    touched: set[Path] = msgspec.field(default_factory=set)
    touched_all: bool = False
    files: list[FileParts] = msgspec.field(default_factory=list)
    """Files that a commit meant to add or drop."""
    torn: bool = False
    """A line is not readable: its writer was killed, or its disk was full."""

    def stale(self, path: Path) -> bool:
        """Check whether the checksums of a leaf may be older than its data, though no writer was killed."""
        return self.touched_all or path in self.touched

    def lines(self) -> bytes:
        """Return a log that says the same, without the sessions that left."""
        events = [*self.opened.values()]
        if self.touched_all or self.touched:
            touched = None if self.touched_all else [list(path) for path in sorted(self.touched)]
            events.append({"leave": "", "touched": touched})
        if self.files:
            events.append({"intent": {"add": [list(parts) for parts in dict.fromkeys(self.files)], "drop": []}})
        return b"".join(map(_line, events))


def read_log(root: int, data: bytes | None = None) -> Log | None:
    """Parse the log; None when there is none.

    Args:
        root: descriptor of the folder.
        data: the bytes of the log, where the caller has read them.
    """
    try:
        data = files.read_small(NAME, root, MAX_LOG) if data is None else data
    except FileNotFoundError:
        return None
    except CorruptStoreError:
        return Log(torn=True)
    log = Log()
    me = _me()
    for line in data.splitlines():
        try:
            _apply(log, _event(line), me)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            log.torn = True
    log.torn |= bool(data) and not data.endswith(b"\n")
    return log


def _apply(log: Log, event: dict[str, object], me: dict[str, object]) -> None:
    if "open" in event:
        key = str(event["open"])
        if {"pid": event["pid"], "host": event["host"]} == me:
            log.own.add(key)
        log.opened[key] = event
    elif "leave" in event:
        log.opened.pop(str(event["leave"]), None)
        log.own.discard(str(event["leave"]))
        touched = event["touched"]
        log.touched_all |= touched is None
        log.touched |= {tuple(map(str, path)) for path in touched or ()}  # type: ignore[attr-defined]
    else:
        intent: dict[str, list[list[str]]] = event["intent"]  # type: ignore[assignment]
        log.files += [tuple(map(str, parts)) for parts in (*intent["add"], *intent["drop"])]


def _me() -> dict[str, object]:
    return {"pid": os.getpid(), "host": _HOST}


_HOST = socket.gethostname()
"""Asked once: the lines of one process have one name."""


class Session:
    """One store's share in a folder that is written in place.

    Args:
        sync: wait until the record of the session is on the storage.
        root: descriptor of the root folder, which carries the lock of the session; the owner closes it after `drop`.
    """

    def __init__(self, root: int, *, sync: bool) -> None:
        self.id = os.urandom(8).hex()
        self.pid = os.getpid()
        self.root = root
        self.sync = sync
        info = os.fstat(root)
        self.key = (info.st_dev, info.st_ino)
        self.detached = False
        self.escaped = False
        """Another process may write through what this session mapped (fork, or a pickled leaf)."""
        self.ended = False
        self._long_log = False
        """The log was long when the session began."""

    def try_alone(self) -> bool:
        """Take the folder for this session alone, if no other session has it; `begin` lets others in."""
        return files.try_lock(self.root, exclusive=True)

    def begin(self, *, timeout: float, url: str) -> None:
        """Record the session in the log; the caller holds the parent's lock (or the folder is not published yet).

        Args:
            timeout: seconds to wait for a process that holds the folder alone.
            url: the location, for messages.

        Raises:
            StoreBusyError: another process still holds the folder alone.
        """
        files.lock(self.root, exclusive=False, timeout=timeout, url=url)
        while not self._append({"open": self.id, **_me()}, sync=self.sync):
            pass
        if self.sync:
            files.fsync(self.root)
        _SESSIONS.add(self)

    def note(self, add: list[FileParts], drop: list[FileParts]) -> None:
        """Log the files that a commit is about to add and drop.

        Args:
            add: files that the commit adds.
            drop: files that it removes.
        """
        self._append({"intent": {"add": [list(p) for p in add], "drop": [list(p) for p in drop]}})

    def leave(self, touched: set[Path] | None, seal: Callable[[Log], bool]) -> None:
        """End in order: log the end; the last session calls `seal` and removes the log.

        Args:
            touched: leaves that may have changed since their checksums were computed; None for any.
            seal: commits the store; returns whether something is left for the next writer. Then an empty log remains.
        """
        if self.ended:
            return
        self.ended = True
        try:
            if self.detached or self.pid != os.getpid():
                return
            if self._long_log:
                _shorten_log(self.root, sync=self.sync)
            changed = None if touched is None else [list(path) for path in touched]
            if not self._alone({"leave": self.id, "touched": changed}):
                return
            log = read_log(self.root)
            # A writer that was killed may have been in the middle of a write: the next opener compares.
            if log is not None and not log.opened and not log.torn:
                if seal(log):
                    files.replace_file(NAME, self.root, b"", sync=self.sync)
                else:
                    files.unlink(NAME, self.root)
        finally:
            self.drop()

    def drop(self) -> None:
        """Release the lock, and forget the descriptor."""
        self.ended = True
        _SESSIONS.discard(self)
        if self.root >= 0 and self.pid == os.getpid():
            files.unlock(self.root)  # closing is not enough: a forked child holds the same open file
        self.root = -1

    def detach(self) -> None:
        """Give up the folder, which this process has replaced: nothing is left to seal."""
        self.detached = True
        files.unlock(self.root)

    def pause(self) -> None:
        """Release the lock for a moment; the caller holds the parent's lock."""
        files.unlock(self.root)

    def resume(self) -> None:
        """Take the lock again after `pause`."""
        files.lock(self.root, exclusive=False, timeout=LOCK_TIMEOUT, url="this store")

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold the folder exclusively; yield False if another session has it, or if memory of this one was shared."""
        if self.ended or self.detached or self.escaped or self.pid != os.getpid() or len(own_sessions(self.key)) > 1:
            yield False
            return
        try:
            yield self._alone()
        finally:
            if not self.ended:
                self.resume()

    def _append(self, event: dict[str, object], *, sync: bool = False) -> bool:
        """Append to the log, and note its length; return False where a shorter one has taken its place meanwhile."""
        fd = os.open(NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | files.SAFE, 0o666, dir_fd=self.root)
        try:
            files.append(fd, _line(event))
            if sync:
                files.fsync(fd)
            info = os.fstat(fd)
            self._long_log = info.st_size > _LONG_LOG
            return files.still_named(info, NAME, self.root)
        finally:
            os.close(fd)

    def _alone(self, last: dict[str, object] | None = None) -> bool:
        """Log an event, and trade the shared lock for the exclusive one, if no other session holds the folder."""
        parent = open_parent(self.root)
        try:
            try:
                if parent >= 0:
                    # So that a save that makes its own sessions pause for a moment does not look like a crash.
                    files.lock(parent, exclusive=False, timeout=LOCK_TIMEOUT, url="this store")
            finally:
                if last is not None:
                    self._append(last)
            files.unlock(self.root)
            for _ in range(3):
                if files.try_lock(self.root, exclusive=True):
                    return True
                if self._others_write():
                    return False
                time.sleep(0.002)  # a reader may be probing for sessions
            return False
        finally:
            if parent >= 0:
                os.close(parent)

    def _others_write(self) -> bool:
        """Check whether another session is open, by those of this process and by the log."""
        if any(other is not self for other in own_sessions(self.key)):
            return True
        return (log := read_log(self.root)) is not None and not log.opened.keys() <= {self.id}


def _shorten_log(root: int, *, sync: bool) -> None:
    """Rewrite the log without the sessions that ended; the caller has a session, so that the log stays.

    Otherwise each opening beside a long session would read of all that came and went. Sessions begin and end under the
    parent's lock, and commit under that of the log, so that none logs anything meanwhile. One that cannot open the
    parent may: what it appends to the old log is moved, or it sees that the log was replaced (`Session._append`).
    """
    parent, old = open_parent(root), -1
    try:
        if parent < 0 or not files.try_lock(parent, exclusive=True):
            return
        old = files.open_plain(NAME, root)
        if not files.try_lock(old, exclusive=True):
            return
        data = os.read(old, os.fstat(old).st_size)
        log = read_log(root, data)
        if log is None or log.torn or len(lines := log.lines()) > len(data) // 2:
            return
        try:
            files.replace_file(NAME, root, lines, sync=sync)
        except OSError:
            return  # no room: the long log says the same
        if rest := os.read(old, os.fstat(old).st_size):
            new = files.open_plain(NAME, root, os.O_WRONLY | os.O_APPEND)
            try:
                files.append(new, rest)
            finally:
                os.close(new)
    finally:
        for fd in (old, parent):
            if fd >= 0:
                files.unlock(fd)  # closing is not enough where another thread forks
                os.close(fd)


def _event(line: bytes) -> Any:
    """Decode what `_line` returned."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:  # a lone surrogate in a name, or no JSON
        return json.loads(line)


def _line(event: dict[str, object]) -> bytes:
    try:
        return msgspec.json.encode(event) + b"\n"
    except UnicodeEncodeError:  # a lone surrogate in a name
        return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def open_parent(root: int) -> int:
    """Open the parent of a folder; returns -1 if it cannot be read (then there is no lock to take)."""
    try:
        return os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    except OSError:
        return -1


def own_sessions(key: tuple[int, int]) -> list[Session]:
    """Return the sessions of this process on a folder (device, inode)."""
    mine = os.getpid()
    return [s for s in _SESSIONS.listed() if s.key == key and not (s.ended or s.detached) and s.pid == mine]


def has_live_session(root: int) -> bool:
    """Check whether a live session holds the folder (through a descriptor of our own)."""
    probe = os.open(".", files.SAFE_DIR, dir_fd=root)
    parent = open_parent(root)
    try:
        if not files.try_lock(probe, exclusive=True):
            return True
        files.unlock(probe)
        if parent < 0:
            return False
        # A save of theirs may have paused its own sessions; it holds the parent's lock meanwhile.
        files.lock(parent, exclusive=False, timeout=LOCK_TIMEOUT, url="the parent folder")
        return not files.try_lock(probe, exclusive=True)
    finally:
        os.close(probe)
        if parent >= 0:
            os.close(parent)


@contextmanager
def exclusive(root: int, *, parent: int, timeout: float, url: str) -> Iterator[None]:
    """Hold a published folder exclusively, to replace it; waits for the sessions of other processes to end.

    The caller holds the parent's lock, which is released while waiting. Sessions of this process
    do not count; after the body they are detached.

    Args:
        root: descriptor of the folder, opened for this call alone, which carries the lock until it is closed.
        parent: descriptor of its parent.
        timeout: seconds to wait.
        url: the location, for messages.

    Raises:
        StoreBusyError: others still write after `timeout` seconds; the message names them.
    """
    info = os.fstat(root)
    deadline = time.monotonic() + timeout
    while True:
        own = own_sessions((info.st_dev, info.st_ino))
        for session in own:
            session.pause()
        if files.try_lock(root, exclusive=True):
            break
        for session in own:
            session.resume()
        if time.monotonic() >= deadline:
            raise refusals.busy(url, holders(root), timeout)
        files.unlock(parent)
        time.sleep(0.02)
        files.lock(parent, exclusive=True, timeout=max(timeout, 1.0), url=url, what="the parent folder")
    try:
        yield
    except BaseException:
        files.unlock(root)
        for session in own:
            session.resume()
        raise
    for session in own:
        session.detach()


def holders(root: int) -> str:
    """Describe the sessions that the log records as open, for messages."""
    log = read_log(root)
    others = [] if log is None else [event for key, event in log.opened.items() if key not in log.own]
    return ", ".join(f"pid {event['pid']} on {event['host']}" for event in others) or "another process"


class Lease:
    """The lifetime of a session: the store and each of its tensors refer to it, and its finalizer ends the session."""

    __slots__ = ("__weakref__", "session")

    def __init__(self) -> None:
        self.session: Session | None = None

    @property
    def ended(self) -> bool:
        """Whether what is written to memory that the session mapped no longer gets to the place."""
        return self.session is not None and (self.session.ended or self.session.detached)

    def escape(self) -> None:
        """Record that another process may write to memory that this session mapped."""
        if self.session is not None:
            self.session.escaped = True


_SESSIONS: LiveObjects[Session] = LiveObjects()


def _forked() -> None:
    for session in _SESSIONS.listed():
        session.escaped = True


os.register_at_fork(before=_forked)
