"""The errors of the step protocol. Every error that twostroke raises on purpose is a :class:`TwoStrokeError`."""

from __future__ import annotations

from collections.abc import Sequence


class TwoStrokeError(Exception):
    """Base of every error that twostroke raises on purpose."""


class InputRefused(TwoStrokeError, ValueError):
    """The caller's input was refused before anything was changed.

    A pipeline passes it on as it is; every other exception of a stage becomes a :class:`StageFailed`.
    """


class StepStateError(TwoStrokeError, RuntimeError):
    """A call that is not legal now. Nothing was changed.

    ``state`` is the state's name, ``call`` the refused call, ``allowed`` what may be called instead.
    """

    def __init__(self, message: str, *, state: str, call: str, allowed: Sequence[str] = ()) -> None:
        self.state = state
        self.call = call
        self.allowed = tuple(allowed)
        super().__init__(message)


class RunnerFaulted(StepStateError):
    """A call on a runner that met something that cannot be undone (the ``__cause__``, where it is known)."""


class WiringError(TwoStrokeError, TypeError):
    """Stages that do not fit together; the message names stage, record and order, and the cure."""


class StageFailed(TwoStrokeError):
    """A stage raised. The step was undone; the original exception is ``__cause__``.

    ``step`` is None where the pipeline ran without a transaction, that is, outside a step.
    """

    def __init__(self, stage: str, step: int | None, request_ids: Sequence[str], cause: BaseException) -> None:
        self.stage = stage
        self.step = step
        self.request_ids = tuple(request_ids)
        shown = ", ".join(self.request_ids[:8]) + (", …" if len(self.request_ids) > 8 else "")
        where = "outside a step" if step is None else f"in step {step} (requests: {shown or 'none'})"
        super().__init__(f"stage {stage!r} failed {where}: {type(cause).__name__}: {cause}")


class TransactionError(TwoStrokeError, RuntimeError):
    """A transaction was used after it ended, or with a savepoint that it does not have any more."""


class TransactionFailed(TwoStrokeError):
    """Actions of a commit or a rollback raised; the others ran. ``errors`` are all their exceptions.

    The first is ``__cause__``. The host's state is not what it should be: the runner cannot go on.
    """

    def __init__(self, what: str, step: int, errors: Sequence[Exception]) -> None:
        self.step = step
        self.errors = tuple(errors)
        listed = "; ".join(f"{type(error).__name__}: {error}" for error in self.errors)
        super().__init__(f"{what} of step {step}: {len(self.errors)} of its actions raised: {listed}")
