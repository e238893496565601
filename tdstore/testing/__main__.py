"""Check a backend against the storage protocol: `python -m tdstore.testing BACKEND --location DIR_OR_URL`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import redirect_stdout
from inspect import signature
from pathlib import Path

import pytest

from tdstore.errors import InvalidArgumentError, ReadOnlyError, TDStoreError, UnsupportedError
from tdstore.hookspecs import Backend
from tdstore.registry import registry
from tdstore.store import Cap
from tdstore.testing import installed
from tdstore.testing.report import Results
from tdstore.testing.setup import able

SYNCED = "every commit waits for the disk: --crash looks at its syncs, as it does where the opener takes `durable`"
DIRTY = "a work (save, rows, structure) that may leave a DirtyStoreError when it is killed"


def main(argv: Sequence[str] | None = None) -> int:
    """Check each backend that was named; the exit status is pytest's, 2 when there is nothing to check."""
    parser = argparse.ArgumentParser(prog="python -m tdstore.testing", description=__doc__)
    parser.add_argument("target", help="a backend's name, a plugin's module, or an opener as module:function")
    parser.add_argument("--location", default="", help="where stores are made: a folder or a URL (default: temporary)")
    parser.add_argument("--no-location", action="store_true", help="for stores that have no name, such as memory")
    parser.add_argument("--suffix", help="ending of each location (default: the backend's first suffix)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="option for each opening")
    parser.add_argument("--one-process", default="", metavar="WHY", help="no other process can open the location")
    parser.add_argument("--report", action="store_true", help="print tables of what is promised and what was shown")
    parser.add_argument("--crash", action="store_true", help="kill writers, too; for stores in local files")
    parser.add_argument("--synced", action="store_true", help=SYNCED)
    parser.add_argument("--dirty", action="append", default=[], metavar="WORK", help=DIRTY)
    parser.add_argument("-k", default="", help="only these tests, as for pytest")
    args = parser.parse_args(argv)
    try:
        backends = find(args.target)
        options = dict(parse_option(text) for text in args.option)
        statuses = []
        for backend in backends:
            if len(backends) > 1:
                print(f"\n## {backend.name}: {backend.summary}\n", flush=True)
            statuses.append(check(backend, args, options))
        return max(statuses)
    except (TDStoreError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def find(target: str) -> list[Backend]:
    """Return the backend of that name, the backends whose opener is in that module, or one for that opener."""
    if ":" in target:
        return [Backend(name=target, opener=target, summary="under test")]
    inside = [b for b in registry().backends().values() if b.opener.partition(":")[0].partition(".")[0] == target]
    return inside or [registry().get(target)]


def parse_option(text: str) -> tuple[str, object]:
    """Parse `"chunks=[1,2]"` into `("chunks", [1, 2])`; a value that is no JSON is a string."""
    name, sep, value = text.partition("=")
    if not sep:
        raise InvalidArgumentError(f"--option takes NAME=JSON, not {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def check(backend: Backend, args: argparse.Namespace, options: dict[str, object]) -> int:
    """Run the kit on one backend, in this process.

    Args:
        backend: the backend.
        args: the command line.
        options: options of the opener.
    """
    suffix = args.suffix if args.suffix is not None else next(iter(backend.suffixes), "")
    location = None if args.no_location else args.location
    caps = caps_of(backend, location, suffix, options)
    job: dict[str, object] = {"location": location, "suffix": suffix, "options": options, "caps": caps}
    job |= {"opener_options": list(signature(registry().opener(backend)).parameters)}
    job |= {"one_process": args.one_process, "crash": args.crash, "dirty": args.dirty, "synced": args.synced}
    job |= {"opener": backend.opener} if ":" in args.target else {"backend": backend.name}
    os.environ[installed.JOB] = json.dumps(job)
    with tempfile.TemporaryDirectory() as empty:
        # A folder of its own: no configuration, conftest or plugin settings of where the user happens to be.
        config = Path(empty) / "pytest.ini"
        config.write_text("[pytest]\n")
        flags = [
            "-c",
            str(config),
            "--rootdir",
            empty,
            "--import-mode=importlib",
            "-p",
            "no:cacheprovider",
            # It puts handlers on each logger of torch thrice a test, which takes a tenth of the kit.
            "-p",
            "no:logging",
            "-q",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "-rf",
        ]
        del sys.modules[installed.__name__]  # pytest imports it again, with the job in the environment
        results = Results()
        arguments = [str(installed.__file__), *flags, *(["-k", args.k] if args.k else [])]
        output = sys.stderr if args.report else sys.stdout  # a report alone goes where the shell sends it
        with redirect_stdout(output):
            status = int(pytest.main(arguments, plugins=[results]))
    if args.report:
        print(results.table(Cap(caps)))
        return status
    print(f"{backend.name} declares: {able(Cap(caps))}")
    print(*results.skipped(), sep="\n")
    if {Cap.WRITE, Cap.PERSISTENT} <= set(Cap(caps)) and not args.crash:
        print(NOT_RUN)
    if status == pytest.ExitCode.TESTS_FAILED:
        print(AFTER_FAILURES)
    return status


NOT_RUN = """\
CrashTests, which kill writers, were not run: --crash runs them, with --dirty rows for stores that may raise a
DirtyStoreError then. For more than local files, subclass tdstore.testing.CrashTests
(docs/reference/storage-protocol.md, "Checking a store")."""
AFTER_FAILURES = """\
The docstring of a failed test is the promise that was broken; -k NAME runs that test alone.
The promises in full: docs/reference/storage-protocol.md. One that the store cannot keep goes, with the
reason, into `deviations` of a subclass of tdstore.testing.StoreTests: a test file of a dozen lines."""
CANNOT_WRITE = """\
the kit writes its own data, and this store could not be opened with mode='w'. If it is not meant to write,
subclass tdstore.testing.StoreTests and override `prepare`, which puts data there by other means"""


def caps_of(backend: Backend, location: str | None, suffix: str, options: dict[str, object]) -> int:
    """Return the abilities of a store of this backend: a new one, closed before it leaves a trace.

    Args:
        backend: the backend.
        location: where the store goes.
        suffix: the suffix of its name.
        options: options of the opener.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = location and f"{location.rstrip('/')}/{uuid.uuid4().hex}{suffix}"
        where = None if location is None else place or f"{folder}/probe{suffix}"
        try:
            store = registry().open(backend, where, mode="w", **options)
        except (ReadOnlyError, UnsupportedError) as error:
            error.hint = CANNOT_WRITE if error.hint is None else f"{error.hint}; {CANNOT_WRITE}"
            raise
        with store:
            return store.caps.value


if __name__ == "__main__":
    sys.exit(main())
