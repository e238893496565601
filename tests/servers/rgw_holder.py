"""`python -m tests.servers.rgw_holder FOLDER`: run the RGW of a test run until nobody uses it (see `shared`)."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.servers.rgw import own_rgw
from tests.servers.shared import hold


def main(folder: Path) -> None:
    # end through `with`, so that the servers end too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the holder was told to end"))
    hold(folder, "rgw", own_rgw())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
