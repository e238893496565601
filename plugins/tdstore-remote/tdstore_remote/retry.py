"""The retry policy: full jitter, five tries, one deadline, and a short wait for objects not found."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tdstore.errors import StoreNotFoundError, TransientError
from tdstore_remote.faults import Again, Call
from tdstore_remote.libraries import load_tenacity
from tdstore_remote.options import Settings

if TYPE_CHECKING:
    import tenacity

T = TypeVar("T")

SLOWEST = 1 << 20
"""Bytes a second that a wire must carry, or large requests count as failed."""
FREE = 8 << 20
"""Bytes that the deadline allows for already."""
MISSING_TRIES = 4
"""An object that a manifest names may be found a moment later: after about a second it counts as removed."""


class Patience:
    """The policy of one engine."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._tenacity = load_tenacity()

    def deadline(self, nbytes: int = 0) -> float:
        """Return the seconds for a call that transfers this many bytes."""
        return self.settings.timeout + max(0, nbytes - FREE) / SLOWEST

    def one_try(self, nbytes: int = 0) -> float:
        """Return the seconds for one try of a write, whose bytes are all sent before the server answers."""
        return self.settings.stall + nbytes / SLOWEST

    async def attempt(
        self,
        call: Call,
        once: Callable[[], Awaitable[T]],
        *,
        nbytes: int = 0,
        each: float = math.inf,
        patient: bool = False,
    ) -> T:
        """Await `once()` until it succeeds.

        Args:
            call: the request, for messages.
            once: one try.
            nbytes: bytes in transfer meanwhile, of this call and others.
            each: seconds for one try (reads need none: their connection detects a stall).
            patient: the object must exist, so that "not found" is retried.

        Raises:
            TransientError: it never succeeded.
            StoreNotFoundError: the object does not exist.
        """
        start, seconds, tries = time.monotonic(), self.deadline(nbytes), 0

        async def one_try() -> T:
            left = max(start + seconds - time.monotonic(), 0.001)
            try:
                async with asyncio.timeout(min(left, each)):
                    return await once()
            except TimeoutError:
                raise Again(f"no answer within {min(seconds, each):.3g} s") from None

        try:  # without tenacity, which takes a third of the CPU of a request that succeeds
            return await one_try()
        except Again as error:
            if error.missing and not patient:  # without tenacity, whose state and this error would hold each other
                self._give_up(call, error, 1, time.monotonic() - start)
            first = error
        try:
            async for trial in self._tenacity.AsyncRetrying(**self._rules(start + seconds - time.monotonic(), patient)):
                tries = trial.retry_state.attempt_number
                with trial:
                    if tries == 1:
                        raise first
                    return await one_try()
        except Again as error:
            self._give_up(call, error, tries, time.monotonic() - start)
        finally:
            del first
        raise AssertionError("tenacity ends with a result or an error")

    def attempt_here(self, call: Call, once: Callable[[float], T], *, nbytes: int = 0, patient: bool = False) -> T:
        """Call as `attempt` does, for a blocking function, which is passed its time limit in seconds."""
        start, seconds, tries = time.monotonic(), self.deadline(nbytes), 0
        try:
            return once(seconds)
        except Again as error:
            if error.missing and not patient:
                self._give_up(call, error, 1, time.monotonic() - start)
            first = error
        try:
            for trial in self._tenacity.Retrying(**self._rules(start + seconds - time.monotonic(), patient)):
                tries = trial.retry_state.attempt_number
                with trial:
                    if tries == 1:
                        raise first
                    return once(max(start + seconds - time.monotonic(), 0.001))
        except Again as error:
            self._give_up(call, error, tries, time.monotonic() - start)
        finally:
            del first
        raise AssertionError("tenacity ends with a result or an error")

    def _rules(self, seconds: float, patient: bool) -> dict[str, Any]:
        tenacity = self._tenacity
        return {
            "retry": tenacity.retry_if_exception(lambda e: isinstance(e, Again) and (patient or not e.missing)),
            "stop": lambda state: self._stop(state) or tenacity.stop_before_delay(seconds)(state),
            "wait": self._wait,
            "reraise": True,
        }

    def _stop(self, state: tenacity.RetryCallState) -> bool:
        error = _error(state)
        return state.attempt_number >= (MISSING_TRIES if error.missing else self.settings.tries)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        error = _error(state)
        if error.missing:  # 0.15 + 0.3 + 0.6 s
            return 0.15 * 2.0 ** (state.attempt_number - 1)
        # obstore does not show Retry-After: a server that requires a lower rate gets twice the pause.
        first = 0.4 if error.busy else 0.2
        return float(self._tenacity.wait_random_exponential(multiplier=first, max=self.settings.timeout / 6)(state))

    def _give_up(self, call: Call, error: Again, tries: int, seconds: float) -> NoReturn:
        if error.missing:
            raise StoreNotFoundError(f"{call.url} does not exist", url=call.url) from error.__cause__
        raise TransientError(
            f"{call.url}: {call.doing} failed {tries} times in {seconds:.1f} s: {error.reason}",
            url=call.url,
            hint=error.hint or "try again later; storage_options={'timeout': seconds, 'tries': n} for more patience",
        ) from error.__cause__


def _error(state: tenacity.RetryCallState) -> Again:
    outcome = state.outcome
    error = outcome.exception() if outcome else None
    assert isinstance(error, Again), "only these are tried again"
    return error
