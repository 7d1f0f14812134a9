"""The machine of a step: two strokes, three states, and a named error for every other order of calls."""

from __future__ import annotations

from enum import StrEnum

from .guard import GuardedMachine, Trigger


class StepState(StrEnum):
    """Where a runner stands between two calls."""

    IDLE = "IDLE"
    """Nothing is under way."""
    FORWARDED = "FORWARDED"
    """The forward pass was launched; its tokens have not been drawn."""
    SAMPLED = "SAMPLED"
    """Tokens were drawn; their output may still be on its way to the host."""


_BETWEEN_STEPS = (StepState.IDLE, StepState.SAMPLED)
_PAIRING = "sample_tokens() must be called after execute_model() returns None"

STEP_TRIGGERS: tuple[Trigger[StepState], ...] = (
    Trigger("execute", _BETWEEN_STEPS, StepState.FORWARDED, call="execute_model"),
    Trigger("skip", _BETWEEN_STEPS, None, call="execute_model"),
    Trigger("sample", (StepState.FORWARDED,), StepState.SAMPLED, call="sample_tokens"),
    Trigger("rollback", (StepState.FORWARDED,), StepState.IDLE, call="rollback"),
    Trigger("settle", _BETWEEN_STEPS, StepState.IDLE, call="settle"),
    Trigger("dummy", _BETWEEN_STEPS, None, call="dummy_run"),
)
"""The whole protocol. ``execute`` and ``skip`` are one public call: with and without scheduled tokens."""


class StepMachine(GuardedMachine[StepState]):
    """Guards the order of calls on one runner; see :meth:`~twostroke.fsm.guard.GuardedMachine.fire`."""

    def __init__(self) -> None:
        super().__init__(STEP_TRIGGERS, StepState.IDLE)

    def _hint(self, trigger: str) -> str:
        if self.state is not StepState.FORWARDED:
            return "there is no forward pass whose tokens could be drawn or undone"
        if trigger in ("execute", "skip"):
            return _PAIRING
        return "a step is open"
