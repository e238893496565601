"""Writes of rows in place: all rows of one call, or, if an error is raised, none.

Rows of contiguous leaves go to the file at once; their old bytes are saved first. Rows of other leaves go through
HDF5 into the overlay, which drops nothing while the storage is full: the next write, or the commit, raises the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from tdstore.errors import TDStoreError
from tdstore.storekit.files import io_errors, raise_io
from tdstore.types import Path, StoreIndex, path_text
from tdstore_h5.file.tree import Leaf
from tdstore_h5.rows import chunked
from tdstore_h5.rows.checksums import BlockSums
from tdstore_h5.rows.contiguous import Ints
from tdstore_h5.rows.undo import Undo
from tdstore_h5.session import Session


class Rows(NamedTuple):
    """One write, in which no row occurs twice."""

    path: Path
    leaf: Leaf
    at: StoreIndex
    value: Tensor
    starts: Ints
    size: int
    """The blocks, as of `contiguous.blocks_of`."""

    @property
    def past_hdf5(self) -> bool:
        """Check whether the rows are written to the file at once."""
        return self.leaf.plain and self.leaf.offset is not None and not self.leaf.held


_path_of = attrgetter("path")


def compare_before(session: Session, path: Path, leaf: Leaf, starts: Ints, size: int) -> None:
    """Compare grains that are about to be changed in part, unless done before: their checksums will be recomputed.

    Args:
        session: the open file.
        path: the leaf.
        leaf: its dataset.
        starts, size: the blocks.

    Raises:
        CorruptStoreError: the rest of such a grain is damaged. Nothing was changed.
    """
    if session.verify == "none" or session.handle.temporary or leaf.committed is None:
        return
    if not session.sums.some_unseen(path):
        return
    grains = session.sums.partly(path, leaf.spec, starts, size)
    if len(grains):
        first = grains * session.sums.leaves[path].grain // leaf.spec.dtype.itemsize
        session.verify_read(path, leaf, first, 1)


def write_rows(session: Session, writes: Sequence[Rows]) -> None:
    """Write rows into leaves.

    Raises:
        StoreError: the storage failed. The leaves read as before; if some do not, a note of the error names them.
    """
    handle = session.handle
    plain: list[Rows] = []
    others: list[Rows] = []
    for w in writes:
        (plain if w.past_hdf5 else others).append(w)
    if others:
        session.overlaid()
        handle.need_room()
    pending = session.pending
    undo, moment = _remember(session, plain)
    try:
        written = _put(session, plain, others)
    except BaseException as error:
        _put_back(session, undo, moment, error)
        if others and not (pending or session.structure or handle.temporary):
            _drop(session, error)  # HDF5 wrote nothing but this since the last commit
        raise
    finally:
        if undo is not session.undo:
            undo.forget()
    for w, block in written:  # once nothing, not even Ctrl-C, has old rows come back
        session.sums.know(w.path, w.leaf.spec, block)


def _put(session: Session, plain: Sequence[Rows], others: Sequence[Rows]) -> list[tuple[Rows, BlockSums]]:
    """Write rows; return those whose checksums were computed on the way."""
    handle, sums = session.handle, session.sums
    written: list[tuple[Rows, BlockSums]] = []
    distinct = len(set(map(_path_of, plain))) == len(plain)  # else one may change a grain that another one filled
    for w in plain:
        sums.touch(w.path, w.leaf.spec, w.starts, w.size)
        assert w.leaf.offset is not None
        arrived = None
        if distinct and len(w.starts) == 1 and w.size:
            block = BlockSums(sums.leaves[w.path], w.leaf.spec, int(w.starts[0]) * w.leaf.spec.dtype.itemsize)
            written.append((w, block))
            arrived = block.add
        try:
            session.raw.write(w.leaf.offset, w.leaf.spec, w.starts, w.size, w.value, arrived)
        except TDStoreError:
            raise
        except OSError as error:
            raise_io(error, session.url, f"writing {path_text(w.path)}")
    for w in others:
        sums.touch(w.path, w.leaf.spec, w.starts, w.size)
        handle.unflushed = session.pending = True
        with handle.writing(f"writing {path_text(w.path)}"):
            _through_hdf5(session, w)
    return written


def _through_hdf5(session: Session, w: Rows) -> None:
    dataset = session.dataset(w.path)
    try:
        chunked.write(dataset, w.leaf.spec, w.at, w.value)
    except (OSError, RuntimeError):
        chunked.need_memory(dataset)
        raise


def _remember(session: Session, writes: Sequence[Rows]) -> tuple[Undo, int]:
    """Save the committed bytes that are about to be overwritten, and reserve blocks."""
    known = [w for w in writes if w.leaf.committed is not None and not session.handle.temporary]
    undo, moment = session.undo, session.undo.now()
    if known and not undo.complete:  # more than is remembered until the commit: then for this call only
        undo, moment = undo.of_one_call(), 0
    bounded = undo is session.undo and not session.structure
    try:
        with io_errors(session.url, "keeping old rows"):
            for w in known:
                assert w.leaf.offset is not None
                undo.remember(w.leaf.offset, w.leaf.spec, w.starts, w.size, bounded=bounded)
                if not undo.complete:
                    return _remember(session, writes)
    except BaseException:
        if undo is not session.undo:
            undo.forget()
        raise
    return undo, moment


def _put_back(session: Session, undo: Undo, moment: int, error: BaseException) -> None:
    try:
        undo.back_to(moment)
    except OSError as second:
        error.add_note(f"{session.url}: old rows could not be put back: {second}")


def _drop(session: Session, error: BaseException) -> None:
    try:
        session.discard(rows=False)
    except TDStoreError as second:
        error.add_note(f"{session.url}: it could not be taken back: {second}; open it again")
