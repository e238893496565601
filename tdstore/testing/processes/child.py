"""A second process that opens a store and executes commands: one JSON line in, one JSON line out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch

from tdstore.errors import TDStoreError
from tdstore.header import Group, Header, encode_header
from tdstore.hookspecs import Backend
from tdstore.registry import registry
from tdstore.store import Store
from tdstore.testing.processes.warm import python
from tdstore.testing.samples import digest
from tdstore.types import LeafSpec, Mode, Path, Read, Write
from tdstore.values import decode_value, encode_value


class Child:
    """A process that opens the same store. `ask(command, ...)` runs one of the `_Commands` there.

    Args:
        backend: what to open; its opener must be importable there, see `import_path`.
        location: the store.
        mode: as for the opener.
        options: plain values only.
        import_path: folders to put on `sys.path` of the process.
    """

    def __init__(
        self,
        backend: Backend,
        location: str,
        *,
        mode: str = "r",
        options: Mapping[str, Any] | None = None,
        import_path: list[str] | None = None,
    ) -> None:
        job = {
            "path": (import_path or []) + [p for p in sys.path if p],
            "backend": [backend.name, backend.opener],
            "location": location,
            "mode": mode,
            "options": encode_value(dict(options or {})),
        }
        # Only the job's own `sys.path` can find this module when tdstore is not installed.
        code = "import sys, json; job = json.loads(sys.stdin.readline()); sys.path[:] = job['path']; "
        code += "from tdstore.testing.processes.child import serve; serve(job)"
        self._process = subprocess.Popen(
            [*python(), "-W", "ignore", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            self._send(job)
            self._receive()
        except BaseException:
            self.close()
            raise

    def ask(self, command: str, *args: Any) -> Any:
        """Run a command in the process; an error there is an `AssertionError` here."""
        self.start(command, *args)
        return self.result()

    def start(self, command: str, *args: Any) -> None:
        """Send a command without waiting for its answer."""
        self._send([command, encode_value(list(args))])

    def result(self) -> Any:
        """Return the answer to the command that was started."""
        return self._receive()

    def close(self) -> None:
        """Close the store there and end the process."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> Any:
        assert self._process.stdout is not None, "it was started with a pipe"
        line = self._process.stdout.readline()
        assert line, f"the second process ended with status {self._process.wait()} (its error is above)"
        status, value = json.loads(line)
        assert status == "ok", f"in the second process: {value}"
        return decode_value(value)


def filled_with(value: torch.Tensor, number: float) -> torch.Tensor:
    """Return a tensor of the same shape and dtype, of one number."""
    return torch.full(value.shape, number, dtype=value.dtype)


class _Commands:
    """The commands of a child."""

    def __init__(self, store: Store, open_again: Callable[[Mode], Store], stopped: Callable[[str], object]) -> None:
        self.store = store
        self.open_again = open_again
        self.stopped = stopped

    def digests(self) -> dict[Path, str]:
        """Return a hash of dtype, shape and bits for every leaf, by path."""
        paths = list(self.store.paths())
        return {p: digest(t) for p, t in zip(paths, self.store.read([Read(p) for p in paths]), strict=True)}

    def header(self) -> bytes:
        """Return the header, as JSON."""
        return encode_header(self.store.load_header())

    def put(self, path: Path, start: int, stop: int, number: float) -> None:
        """Fill rows `start` to `stop` with a number, one write per row.

        Args:
            path: the leaf.
            start, stop: the rows.
            number: the value.
        """
        (spec,) = self.store.specs([path])
        for row in range(start, stop):
            value = torch.full((1, *spec.shape[1:]), number + row, dtype=spec.dtype)
            self.store.write([Write(path, (slice(row, row + 1, 1),), value)])
        self.store.flush()

    def put_whole(self, path: Path, number: float) -> None:
        """Fill a leaf with a number."""
        (spec,) = self.store.specs([path])
        self.store.write([Write(path, (), torch.full(spec.shape, number, dtype=spec.dtype))])
        self.store.flush()

    def hold(self, path: Path, number: float) -> None:
        """Fill a leaf with a number, and commit nothing."""
        (spec,) = self.store.specs([path])
        self.store.write([Write(path, (), torch.full(spec.shape, number, dtype=spec.dtype))])

    def close_in_fork(self) -> int:
        """Fork, close the store in the forked process, and return how that ended."""
        pid = os.fork()
        if not pid:
            try:
                with suppress(TDStoreError):
                    self.store.close()
            finally:
                os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def replace(self, number: int) -> str:
        """Save over the store: the same leaves, of one number, and a header of that batch size."""
        with self.open_again("r") as store:
            old = dict(zip(paths := list(store.paths()), store.specs(paths), strict=True))
        return self._commit("w", number, old)

    def change(self, number: int) -> str:
        """Fill all leaves with a number in place, and commit a header of that batch size."""
        return self._commit("r+", number, None)

    def stop_in_commit(self, number: int, part: float) -> str:
        """Fill all leaves with a number, and stop in the middle of the commit, until `go_on` is asked for.

        Args:
            number: the number.
            part: of the functions that a commit calls, those that are called before.

        Returns:
            "stopped"; or the text of an error of tdstore. `go_on` returns what the commit said.
        """
        calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        def stop(frame: object, event: str, arg: object) -> None:
            nonlocal calls
            calls -= event in ("call", "c_call")
            if calls < 0:
                sys.setprofile(None)
                self.stopped("stopped")

        said = self._commit("r+", number, None, count)
        if said:
            return said
        calls = round(calls * part)
        return self._commit("r+", number, None, stop)

    def _commit(self, mode: Mode, number: int, leaves: dict[Path, LeafSpec] | None, profile: Any = None) -> str:
        """Open, change and commit; the result is the text of an error of tdstore."""
        try:
            with self.open_again(mode) as store:
                if leaves is not None:
                    store.create(leaves)
                specs = leaves or dict(zip(paths := list(store.paths()), store.specs(paths), strict=True))
                values = {path: torch.full(spec.shape, number, dtype=spec.dtype) for path, spec in specs.items()}
                store.write([Write(path, (), value) for path, value in values.items()])
                sys.setprofile(profile)
                try:
                    store.save_header(Header({(): Group(batch_size=(number,))}))
                finally:
                    sys.setprofile(None)
        except TDStoreError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def save_header(self, size: int) -> None:
        """Commit a header with that batch size."""
        self.store.save_header(Header({(): Group(batch_size=(size,))}))

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def serve(job: dict[str, Any]) -> None:
    """Open the store of `job` and answer commands until stdin ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # output of a backend must not look like an answer
    name, opener = job["backend"]
    backend = Backend(name=name, opener=opener, summary="under test")

    def open_it(mode: Mode) -> Store:
        return registry().open(backend, job["location"], mode=mode, **decode_value(job["options"]))

    try:
        store = open_it(job["mode"])
    except Exception as error:
        _answer(answers, "error", f"{type(error).__name__}: {error}")
        raise
    _answer(answers, "ok", None)
    with store:

        def stopped(said: str) -> None:
            _answer(answers, "ok", said)
            sys.stdin.readline()

        commands = _Commands(store, open_it, stopped)
        for line in sys.stdin:
            command, args = json.loads(line)
            try:
                result = encode_value(getattr(commands, command)(*decode_value(args)))
            except Exception as error:
                _answer(answers, "error", f"{type(error).__name__}: {error}")
            else:
                _answer(answers, "ok", result)


def _answer(stream: Any, status: str, value: object) -> None:
    stream.write(json.dumps([status, value]) + "\n")
    stream.flush()
