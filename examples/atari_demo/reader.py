"""The new process: opens what another one wrote, and reports what is in it as one line of JSON.

`python reader.py '{"location": ..., "storage": ..., "seeds": 24, "label": ...}'`
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time

from batches import examine

import tdstore


def main(job: dict[str, object]) -> None:
    """Open, look, report."""
    opened = []
    for _ in range(6):
        start = time.perf_counter()
        td = tdstore.open(job["location"], storage=job["storage"])
        opened.append(time.perf_counter() - start)
        td.close()
    with tdstore.open(job["location"], storage=job["storage"]) as td:
        findings = examine(td, range(int(str(job["seeds"]))), str(job["label"]))
    report = {
        "first_open": opened[0],  # imports the backend, too
        "open": statistics.median(opened[1:]),
        "findings": dataclasses.asdict(findings),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
