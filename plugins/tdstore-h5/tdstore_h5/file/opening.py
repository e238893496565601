"""Opening of an existing file: wait for its lock, finish the commit of a dead writer, read the contents."""

from __future__ import annotations

import gc
import os
import threading
from operator import attrgetter

from tdstore.errors import StoreBusyError
from tdstore.storekit import refusals
from tdstore.storekit.budget import check_declared
from tdstore_h5.file.handle import Handle, Replaced, open_plain
from tdstore_h5.file.journal import Found, finish, look
from tdstore_h5.session import OPEN, Session

_NBYTES = attrgetter("spec.nbytes")


def _lock(session: Session, handle: Handle, *, write: bool) -> None:
    """Wait for the file's lock, but not for a handle of this very thread, which could not close it meanwhile."""
    why = "to write in place" if write else "to read"
    try:
        handle.lock(alone=write, timeout=0, why=why)
        return
    except StoreBusyError:
        if _own_handle(handle, write=write):
            gc.collect()  # handles dropped without close() may still exist
        if _own_handle(handle, write=write):
            how = "open in" if write else "open for writing in"
            hint = "close() that one first, or work with it"
            raise refusals.busy(session.url, "this process", how=how, hint=hint) from None
    handle.lock(alone=write, timeout=session.timeout, why=why)


def _own_handle(handle: Handle, *, write: bool) -> bool:
    info = os.fstat(handle.fd)
    others = [s.handle for s in OPEN if s.thread == threading.get_ident()]
    return any((write or h.alone) and not h.child and h.locking is not False and h.holds(info) for h in others)


def open_session(session: Session, *, write: bool, verify: str, accept: bool, max_bytes: int | None = None) -> None:
    """Open an existing file: lock, walk, check.

    Args:
        session: receives the contents.
        write: open to write in place.
        verify: "full", "size" or "none".
        accept: accept a file that a dead writer left.
        max_bytes: refuse a file that declares more data.
    """
    for _ in range(100):
        handle = open_plain(session.path, session.url, write=write, locking=session.locking)
        try:
            _lock(session, handle, write=write)
            if handle.is_at(session.path):
                found = look(session.path, session.url, handle.fd)
                if found is not None and found.size is not None:
                    _finish(session, handle, found)
                    if not write:
                        handle.release()
                        continue
                    found = None
                session.attach(handle, "r")
                mark = session.load()
                declared = sum(map(_NBYTES, session.contents.leaves.values()))
                check_declared(declared, max_bytes, session.url)
                if found is not None and found.marked:
                    mark = (mark or set()) | found.marked
                session.check(mark, verify=verify, accept=accept)
                if write and found is not None and not session.marked:
                    session.journal.remove()
                return
        except BaseException as error:
            session.forget()
            handle.release()
            if isinstance(error, Replaced):
                continue
            raise
        handle.release()  # replaced while we waited for its lock
    raise refusals.contended(session.url)


def _finish(session: Session, handle: Handle, found: Found) -> None:
    """Apply the commit in the journal of a dead writer. A reader reopens the file afterwards."""
    if handle.write:
        finish(session.path, session.url, handle.fd, found, sync=session.durable)
        return
    handle.release()  # a reader's lock would be waited for
    writer = open_plain(session.path, session.url, write=True, locking=session.locking)
    try:
        _lock(session, writer, write=True)
        again = look(session.path, session.url, writer.fd) if writer.is_at(session.path) else None
        if again is not None and again.size is not None:
            finish(session.path, session.url, writer.fd, again, sync=session.durable)
    finally:
        writer.release()
