"""The transaction of one step: what undoes it, and what may only happen once it can no longer be undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .errors import TransactionError, TransactionFailed

Action = tuple[Callable[..., object], tuple[Any, ...]]


class Savepoint(NamedTuple):
    """How much a transaction held when :meth:`Transaction.savepoint` was called."""

    undos: int
    commits: int


class Transaction:
    """Spans the two strokes of a step. Ends once, by :meth:`commit` or by :meth:`rollback`.

    Undos are *idempotent restores*: ``on_undo`` is called on the line before the change, so an undo may run although
    its change never happened or happened in part. Write ``tx.on_undo(table.__setitem__, row, old_value)`` and not
    ``tx.on_undo(table.decrement, row)``.

    An interrupt cuts a commit or a rollback short. Calling it again goes on: with the undo that was cut short, or with
    the commit action after it.

    ``step`` numbers the step; ``request_ids`` are the requests that a failure of the step would be reported for (the
    stage that knows the batch sets them).
    """

    __slots__ = ("_commits", "_ended", "_errors", "_undos", "request_ids", "step")

    def __init__(self, step: int, request_ids: Sequence[str] = ()) -> None:
        self.step = step
        self.request_ids: Sequence[str] = request_ids
        self._undos: list[Action] = []
        self._commits: list[Action] = []
        self._errors: list[Exception] = []
        self._ended = ""

    @property
    def closed(self) -> bool:
        """Whether the transaction was committed or rolled back."""
        return bool(self._ended)

    def on_undo(self, fn: Callable[..., object], *args: Any) -> None:
        """Run ``fn(*args)`` if the step is undone. Call it before the change that ``fn`` takes back.

        Raises:
            TransactionError: the transaction has ended.
        """
        self._require_open()
        self._undos.append((fn, args))

    def on_commit(self, fn: Callable[..., object], *args: Any) -> None:
        """Run ``fn(*args)`` when the step is certain: for effects that nothing takes back, such as freeing a row.

        Raises:
            TransactionError: the transaction has ended.
        """
        self._require_open()
        self._commits.append((fn, args))

    def savepoint(self) -> Savepoint:
        """A mark for :meth:`rollback_to`: what comes after it can be undone on its own.

        Raises:
            TransactionError: the transaction has ended.
        """
        self._require_open()
        return Savepoint(len(self._undos), len(self._commits))

    def rollback_to(self, mark: Savepoint) -> None:
        """Undo what was pushed since ``mark``, latest first, and forget the commit actions since. Stays open.

        Raises:
            TransactionError: the transaction has ended, or was rolled back beyond ``mark`` before.
            TransactionFailed: undos raised; all of them ran.
        """
        self._require_open()
        if mark.undos > len(self._undos) or mark.commits > len(self._commits):
            raise TransactionError(f"step {self.step} was rolled back beyond this savepoint; take a new one")
        del self._commits[mark.commits :]
        self._unwind(mark.undos)

    def rollback(self) -> None:
        """Run every undo, latest first, and forget the commit actions. Each runs once, however often this is called.

        Raises:
            TransactionError: the transaction was committed.
            TransactionFailed: undos raised; all of them ran.
        """
        self._end("rolled back")
        self._commits.clear()
        self._unwind(0)

    def commit(self) -> None:
        """Run the commit actions in the order they were pushed and forget the undos. Each runs once, as above.

        Raises:
            TransactionError: the transaction was rolled back.
            TransactionFailed: commit actions raised; all of them ran.
        """
        self._end("committed")
        self._undos.clear()
        while self._commits:
            fn, args = self._commits[0]
            del self._commits[0]
            try:
                fn(*args)
            except Exception as error:
                self._errors.append(error)
        self._raise_errors("commit")

    def _require_open(self) -> None:
        if self._ended:
            raise TransactionError(f"the transaction of step {self.step} was {self._ended} and takes nothing more")

    def _end(self, how: str) -> None:
        if self._ended not in ("", how):
            raise TransactionError(f"the transaction of step {self.step} was {self._ended}; it cannot be {how} as well")
        self._ended = how

    def _unwind(self, kept: int) -> None:
        """Run and drop undos until ``kept`` are left. One that is interrupted is still there the next time."""
        while len(self._undos) > kept:
            fn, args = self._undos[-1]
            try:
                fn(*args)
            except Exception as error:
                self._errors.append(error)
            del self._undos[-1]
        self._raise_errors("rollback")

    def _raise_errors(self, what: str) -> None:
        if self._errors:
            errors, self._errors = self._errors, []
            raise TransactionFailed(what, self.step, errors) from errors[0]
