"""The story of a step: what goes in and out, the records that flow, and one file for each phase.

What is exported here needs no torch; records and stages are imported from their own modules.
"""

from .errors import InvalidGrammarOutput, InvalidSamplingParams, InvalidSchedulerOutput, RequestFailed
from .io import (
    CachedRequestData,
    GrammarOutput,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from .sampling_params import SamplingParams

__all__ = [
    "CachedRequestData",
    "GrammarOutput",
    "InvalidGrammarOutput",
    "InvalidSamplingParams",
    "InvalidSchedulerOutput",
    "LogprobsLists",
    "ModelRunnerOutput",
    "NewRequestData",
    "RequestFailed",
    "SamplingParams",
    "SchedulerOutput",
]
