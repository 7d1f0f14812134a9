"""What other threads ask of the loop's thread: to pause, and work to be done between steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from attrs import field, frozen

PauseMode = Literal["abort", "wait", "keep"]
"""What a pause does with the requests that have begun: end them, let them finish, or keep them for later."""


@frozen(eq=False)
class Job:
    """A function to be called once, and what comes of it. ``recompute``: keys and values are void after it."""

    _fn: Callable[[], Any]
    _recompute: bool
    _outcome: Future[Any] = field(factory=lambda: Future())

    def run(self, recompute: Callable[[], None]) -> None:
        """Call it, on the loop's thread; what it raises is for the one who waits."""
        try:
            try:
                result = self._fn()
            finally:  # it may have come half way
                if self._recompute:
                    recompute()
        except BaseException as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(result)

    def refuse(self, error: Exception) -> None:
        """It will not be called."""
        self._outcome.set_exception(error)

    def result(self) -> Any:
        """Wait for it; gives what it returned, or raises what it raised."""
        return self._outcome.result()
