"""What a proxy can do wrong on demand, and what it saw."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Fault:
    """One thing to do wrong, to the requests that match. `hits` counts the times that it was done.

    `method` and `path` are regular expressions: the whole method, and some part of the path with its query.
    `nth=3` is the third matching request only, `every=3` each third one; `times` ends it after so many.
    """

    kind: str
    method: str = ".*"
    path: str = ""
    nth: int = 0
    every: int = 0
    times: int = 0
    status: int = 0
    retry_after: float | None = None
    after: int | None = None  # bytes of the body, or of a raw connection
    hits: int = 0
    matched: int = 0
    passed: int = 0  # raw mode: bytes to clients since it was set

    def wants(self, method: str, path: str) -> bool:
        """Count a request, and tell whether this fault is for it."""
        if not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        self.matched += 1
        if (self.nth and self.matched != self.nth) or (self.every and self.matched % self.every):
            return False
        if self.times and self.hits >= self.times:
            return False
        self.hits += 1
        return True


@dataclass
class Request:
    """One request that came to a proxy. Times are those of time.monotonic(); `end` is 0 while it goes on."""

    method: str
    path: str
    range: str = ""
    start: float = 0.0
    end: float = 0.0
    status: int = 0
    received: int = 0  # bytes of the request's body
    sent: int = 0  # bytes of the answer's body that went to the client
    fault: str = ""


def count_rounds(requests: Iterable[Request]) -> int:
    """Return how many requests came one after the other: the longest chain where each starts after the last ended.

    Requests that overlap in time cannot have waited for each other. Give the proxy some latency, or requests that
    were sent together may be over one by one.
    """
    rounds, free = 0, float("-inf")
    # the client may have an answer a moment before its end is noted: then the request counts as still going on
    spans = [(request.end or float("inf"), request.start) for request in requests]
    for end, start in sorted(spans):
        if start >= free:
            rounds, free = rounds + 1, end
    return rounds


@dataclass
class Script:
    """The faults that are set now; any thread may change them."""

    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def choose(self, method: str, path: str) -> Fault | None:
        """Return the first fault that wants this request; those after it do not see it."""
        with self._lock:
            return next((fault for fault in self._faults if fault.wants(method, path)), None)

    def bytes_passed(self, size: int) -> tuple[Fault, int] | None:
        """Raw mode: count bytes on their way to a client; return a fault that is due, and how many of them may go."""
        with self._lock:
            for fault in self._faults:
                if fault.after is None or (fault.times and fault.hits >= fault.times):
                    continue
                allowed = max(0, fault.after - fault.passed)
                fault.passed += size
                if size > allowed or (size and fault.passed >= fault.after):
                    fault.hits += 1
                    fault.passed = 0
                    return fault, min(allowed, size)
        return None
