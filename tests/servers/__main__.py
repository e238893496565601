"""`python -m tests.servers redis rgw azurite`: run servers until Ctrl-C, and print how to reach them."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from tests.servers import azurite, redis_server, s3_moto, s3_rgw

KNOWN: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "redis": redis_server,
    "moto": s3_moto,
    "rgw": s3_rgw,
    "azurite": azurite,
}


def main(names: list[str]) -> None:
    unknown = set(names) - set(KNOWN)
    if unknown or not names:
        sys.exit(f"usage: python -m tests.servers {' '.join(f'[{name}]' for name in KNOWN)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            for name in names:
                server = stack.enter_context(KNOWN[name]())
                print(f"# {name}: {server.url}")
                for variable, value in getattr(server, "env", {}).items():
                    print(f"export {variable}={shlex.quote(value)}")
            sys.stdout.flush()
            signal.pause()
    except KeyboardInterrupt:
        print("# stopped", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
