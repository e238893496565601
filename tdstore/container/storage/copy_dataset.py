"""`tdstore.copy`: a dataset from one location to another, checked, resumable, in bounded memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec

from tdstore.arguments import check_int, refuse_type
from tdstore.container.core.container import Container
from tdstore.container.storage.describe import describe
from tdstore.container.storage.handle import StoreHandle
from tdstore.errors import KeyNotFoundError, OptionError, StoreError, StoreExistsError
from tdstore.header import Group, Header
from tdstore.hookspecs import Backend
from tdstore.io.blocks import BLOCK_BYTES, MAX_DIMS, Batch, leaf_batches
from tdstore.io.copying import Checkpoints, ReadBatch, StoreReader, batch_bytes, pieces_work, stream
from tdstore.io.opening import Location, Storage, find_backend, find_partial, locate
from tdstore.io.partial import Mark, fingerprint, plan_name, with_mark
from tdstore.io.progress import Progress
from tdstore.io.rules import Rules, apply_rules, near_key
from tdstore.keys import unravel
from tdstore.registry import registry
from tdstore.store import Cap, Store
from tdstore.types import LeafSpec, Mode, Path, path_text

Verify = bool | Literal["source", "target"]


def copy_dataset(
    src: Any,
    dst: Location,
    *,
    storage: Storage = None,
    src_storage: Storage = None,
    keys: Any = None,
    mode: Mode = "x",
    layout: str | None = None,
    rules: Rules | None = None,
    verify: Verify = True,
    resume: bool = True,
    progress: bool | None = None,
    block_bytes: int = BLOCK_BYTES,
    checkpoint: float = 5.0,
    src_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Copy a dataset between any two locations, block by block, with a few blocks in memory, whatever its size.

    Leaves, nested TensorDicts, batch sizes, names and values that are not tensors are all copied. A copy that
    was interrupted, even by `kill -9`, is finished by the same call: every `checkpoint` seconds, what has been copied
    is committed, with a record of the progress. Until the record is removed at the
    end, `open` and `load` refuse the target with `DirtyStoreError`. A copy that ends before its first
    checkpoint leaves no trace. If the source changed in between, a warning says so, and all is copied again.

    Args:
        src: a location, or an open TensorDict (whose copy cannot be resumed: its data may be changed at any time).
        dst: the location of the copy.
        storage: name of the target's backend; default: found from `dst`.
        src_storage: name of the source's backend; default: found from `src`.
        keys: copy these (nested) keys only, of tensors, nested TensorDicts or values.
        mode: "x" refuses an existing dataset. "w" replaces it in one step at the end, and then cannot be resumed;
            a partial copy is replaced from the start, or finished if it is one of the same source.
        layout: "random" (single rows) or "scan" (long runs of rows): the access that the target's chunks are
            sized for. It is the option `layout` of the target's backend; a backend without it refuses it.
        rules: options of single leaves, `{pattern: {option: value}}`: a tuple is matched part by part, a string
            against the path written with dots, both with `*` and `?`; what matches a nested TensorDict matches all
            in it. The last rule that names an option wins. `{"*": {"layout": "scan"}, "next.*": {"chunks": 1}}`.
        verify: "source" compares the source with the checksums that it keeps, "target" reads each block back and
            compares it with what was written; True does both.
        resume: False makes no partial target, and continues none.
        progress: show a bar; default: if stderr is a terminal.
        block_bytes: size of a block. Blocks are aligned with the chunks of the target and the source.
        checkpoint: seconds between two checkpoints; more where they are slow, so that they take a tenth of the time
            at most. 0: after each block.
        src_options: options of the source's backend.
        **options: options of the target's backend: compression, chunks, credentials, ...

    Raises:
        StoreExistsError: there is a dataset at `dst` already, or a partial copy of another one.
        CorruptStoreError: a leaf of the source is damaged, or the target reads back other values than were
            written; the error names the leaf and its rows. The target is not published.
        KeyNotFoundError: one of `keys`, or a rule, matches nothing.
        OptionError: an option that the backend does not have.

    Example:
        >>> TensorDict({"a": torch.arange(3)}, [3]).save("runs/1").close()
        >>> tdstore.copy("runs/1", "run.h5", layout="scan", compression="gzip")
        >>> tdstore.load("run.h5").read()["a"]
        tensor([0, 1, 2])
    """
    if mode not in ("w", "x"):
        raise OptionError(f"copy takes mode 'x' or 'w', not {mode!r}")
    if verify not in (True, False, "source", "target"):
        raise OptionError(f"verify must be True, False, 'source' or 'target', not {verify!r}")
    check_int(block_bytes, "block_bytes")
    if block_bytes < 1:
        raise OptionError(f"block_bytes must be positive, not {block_bytes!r}")
    if not isinstance(checkpoint, (int, float)) or not checkpoint >= 0:
        raise OptionError(f"checkpoint is a number of seconds, not {checkpoint!r}")
    if dst is None:
        raise refuse_type("dst", "a path or a URL", dst)
    if layout is not None:
        options["layout"] = layout
    dst, options = locate(dst, options)
    src, own = (src, dict(src_options or {})) if isinstance(src, Container) else locate(src, dict(src_options or {}))
    backend, text = find_backend(dst, storage, mode)
    with Source(src, src_storage, own, keys, rules or {}, verify in (True, "source")) as source:
        job = Job(source, backend, text, mode, options, verify in (True, "target"), resume, block_bytes, checkpoint)
        job.run(progress)


class Source:
    """The source of a copy: its records, its leaves, and how their data is read."""

    def __init__(
        self, src: Any, storage: Storage, options: Mapping[str, Any], keys: Any, rules: Rules, verify: bool
    ) -> None:
        self.handle: StoreHandle | None = None
        self.location = None if isinstance(src, Container) else src
        if isinstance(src, Container):
            if storage is not None or options:
                raise OptionError("src_storage and src_options are for a location, not for an open TensorDict")
            groups, specs = describe(src)
            pieces: Any = src._read_pieces
            self.read: ReadBatch = lambda batch, outs: pieces(batch)
            self.caps = Cap.PARTIAL_READ
        else:
            self.handle = StoreHandle.open(src, storage=storage, mode="r", **options)
            groups, specs = self.handle.groups, self.handle.specs
            self.read = StoreReader(self.handle.store, verify=verify)
            self.caps = self.handle.store.caps
        try:
            self.groups, chosen = (groups, specs) if keys is None else select(groups, specs, keys)
            self.chunks = {path: spec.options.get("chunks") for path, spec in chosen.items()}
            # The options of the source are those of its backend; the target's come from its own and the rules.
            plain = {p: LeafSpec(s.shape, s.dtype, fill_value=s.fill_value) for p, s in chosen.items()}
            self.specs = apply_rules(plain, rules)
        except BaseException:
            self.close()
            raise

    @cached_property
    def state(self) -> str:
        """The fingerprint of a source that has a location."""
        assert self.handle is not None
        return fingerprint(self.handle.store, self.location, self.handle.groups, self.handle.specs)

    def close(self) -> None:
        """Close what was opened here."""
        if self.handle is not None:
            self.handle.store.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Job(msgspec.Struct):
    """One copy: find or make the target, stream, commit."""

    source: Source
    backend: Backend
    location: str | None
    mode: Mode
    options: dict[str, Any]
    verify: bool
    resume: bool
    block_bytes: int
    checkpoint: float

    def run(self, progress: bool | None) -> None:
        """Copy all, or what is left of it."""
        target, resumable, mark = self._open_target()
        try:
            if mark is None:
                target.create(self.source.specs)
            batches, plan = self._plan(target, self.block_bytes if mark is None else mark.block_bytes)
            if mark is not None and (mark.plan != plan or mark.of != len(batches)):
                target.close()
                target, mark = self._over_again("it was begun with other options", 4), None
                target.create(self.source.specs)
                batches, plan = self._plan(target, self.block_bytes)
            block = self.block_bytes if mark is None else mark.block_bytes
            start = 0 if mark is None else mark.done
            self._stream(target, batches, start, self._checkpoints(target, batches, plan, block, resumable), progress)
            target.save_header(Header(self.source.groups))
        except BaseException as error:
            try:
                target.close()
            except StoreError as second:
                error.add_note(f"(and closing the target failed: {second})")
            raise
        target.close()

    def _stream(
        self,
        target: Store,
        batches: list[Batch],
        start: int,
        checkpoints: Checkpoints | None,
        progress: bool | None,
    ) -> None:
        specs, source = self.source.specs, self.source
        before = sum(batch_bytes(specs, batch) for batch in batches[:start])
        with Progress(sum(s.nbytes for s in specs.values()), "copy", progress, done=before) as bar:
            if checkpoints is not None and start:
                checkpoints.saved = start
            stream(
                source.read,
                target,
                specs,
                batches,
                bar=bar,
                own_buffers=source.handle is not None,
                start=start,
                verify=self.verify,
                checkpoints=checkpoints,
            )

    # -- what to do --------------------------------------------------------------------------
    def _plan(self, target: Store, block_bytes: int) -> tuple[list[Batch], str]:
        specs = self.source.specs
        chunks: dict[Path, list[tuple[int, ...]]] = {}
        for path, made in zip(specs, target.specs(list(specs)), strict=True):
            # Where chunks are packed into shards, a shard is what is written in one go.
            written = made.options.get("shards") or made.options.get("chunks")
            found = (written, self.source.chunks.get(path))
            chunks[path] = [tuple(c) for c in found if isinstance(c, (tuple, list))]
        limit = block_bytes
        if not pieces_work(self.source.caps, target.caps, verify=self.verify):
            limit = max([block_bytes, *(spec.nbytes for spec in specs.values())])
        # A window of an open container has rows, and only rows, to be read in pieces.
        batches = list(leaf_batches(specs, limit, chunks, dims=1 if self.source.handle is None else MAX_DIMS))
        return batches, plan_name(specs, chunks, self.options, (limit, len(batches)))

    def _checkpoints(
        self, target: Store, batches: list[Batch], plan: str, block: int, resumable: bool
    ) -> Checkpoints | None:
        if not resumable or len(batches) < 2 or Cap.PERSISTENT | Cap.PARTIAL_WRITE not in target.caps:
            return None
        source, handle = self.source, self.source.handle
        assert handle is not None
        state = source.state  # as it is before the first block is read

        def save(done: int) -> None:
            at = batches[min(done, len(batches) - 1)][0][0]
            mark = Mark(handle.store.url, state, plan, block, done, len(batches), at)
            target.save_header(with_mark(source.groups, mark))

        return Checkpoints(save, self.checkpoint)

    # -- the target --------------------------------------------------------------------------
    def _open_target(self) -> tuple[Store, bool, Mark | None]:
        """Return the target, whether its copy can be resumed, and the mark of a partial copy to finish."""
        can_resume = self.resume and self.source.handle is not None
        try:
            return self._open("x"), can_resume, None
        except StoreExistsError:
            found = find_partial(self.backend, self.location, self.options)
            if found is None:
                if self.mode == "x":
                    raise
                return self._open("w"), False, None
            mark, handle = found.mark, self.source.handle
            if handle is None or mark.source != handle.store.url:
                if self.mode == "x":
                    raise StoreExistsError(
                        f"{self.location} holds an incomplete copy of {mark.source}",
                        url=self.location,
                        hint=f"finish it by tdstore.copy({mark.source!r}, {self.location!r}), "
                        "or pass mode='w' to replace it",
                    ) from None
                return self._open("w"), can_resume, None
        if not can_resume:
            return self._open("w"), False, None
        if mark.state != self.source.state:
            return self._over_again(f"{mark.source} was changed since", 5), True, None
        return self._open("r+", recover=found.dirty), True, mark

    def _over_again(self, why: str, level: int) -> Store:
        text = f"the incomplete copy at {self.location} cannot be finished: {why}; all is copied anew"
        warnings.warn(text, stacklevel=level)
        return self._open("w")

    def _open(self, mode: Mode, *, recover: bool = False) -> Store:
        # What a killed copy was writing is written once more: half-written leaves may be taken as they are.
        more = {"recover": "accept"} if recover else {}
        return registry().open(self.backend, self.location, mode=mode, **{**self.options, **more})


def select(
    groups: Mapping[Path, Group], specs: Mapping[Path, LeafSpec], keys: Any
) -> tuple[dict[Path, Group], dict[Path, LeafSpec]]:
    """Select the records and leaves of some keys, with the TensorDicts that lead to them.

    Raises:
        KeyNotFoundError: one of them is not there; the hint is the nearest key.
    """
    wanted = [unravel(key) for key in ([keys] if isinstance(keys, (str, tuple)) else keys)]
    entries = [(*path, key) for path, group in groups.items() for key in group.keys]
    missing = set(wanted) - set(entries)
    for key in wanted:
        if key in missing:
            raise KeyNotFoundError(f"there is no entry {path_text(key)} to copy", hint=near_key(key, entries))
    below = set(wanted)
    leads = {path[:depth] for path in wanted for depth in range(len(path))}

    def chosen(path: Path) -> bool:
        return path in leads or any(path[:depth] in below for depth in range(1, len(path) + 1))

    selected = {
        path: msgspec.structs.replace(
            group,
            keys=tuple(key for key in group.keys if chosen((*path, key))),
            values={key: value for key, value in group.values.items() if chosen((*path, key))},
        )
        for path, group in groups.items()
        if chosen(path) or not path
    }
    return selected, {path: spec for path, spec in specs.items() if chosen(path)}
