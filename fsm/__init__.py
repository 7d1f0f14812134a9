"""The protocol of a step: the machines that guard it, the pipeline that does it, the transaction that undoes it.

Pure Python; nothing here knows what a stage computes, and importing it loads no torch.
"""

from .diagram import life_diagram, step_diagram
from .errors import (
    InputRefused,
    RunnerFaulted,
    StageFailed,
    StepStateError,
    TransactionError,
    TransactionFailed,
    TwoStrokeError,
    WiringError,
)
from .life import LIFE_TRIGGERS, SLEEP_PARTS, LifeMachine, LifeState
from .machine import STEP_TRIGGERS, StepMachine, StepState
from .observers import Observers, StageObserver, StageTimes
from .pipeline import Pipeline
from .plan import Records
from .transaction import Savepoint, Transaction
from .wiring import stage

__all__ = [
    "LIFE_TRIGGERS",
    "SLEEP_PARTS",
    "STEP_TRIGGERS",
    "InputRefused",
    "LifeMachine",
    "LifeState",
    "Observers",
    "Pipeline",
    "Records",
    "RunnerFaulted",
    "Savepoint",
    "StageFailed",
    "StageObserver",
    "StageTimes",
    "StepMachine",
    "StepState",
    "StepStateError",
    "Transaction",
    "TransactionError",
    "TransactionFailed",
    "TwoStrokeError",
    "WiringError",
    "life_diagram",
    "stage",
    "step_diagram",
]
