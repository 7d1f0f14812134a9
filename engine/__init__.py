"""What is built once and lives long: runner, model and caches, scheduler, serving loop, command line.

Names are imported when they are first used, so that the scheduler can be had without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..stages.sampling_params import SamplingParams
    from .config import EngineConfig, InvalidConfig
    from .llm import LLM
    from .loading import LoadedModel, load_model
    from .model_runner import ModelRunner, build_runner
    from .outputs import RequestOutput
    from .scheduler import RequestRefused, Scheduler, SchedulerConfig
    from .serving_loop import ServingLoop
    from .stage_set import StageSet
    from .structured import GrammarSpec

_HOME = {
    "EngineConfig": ".config",
    "GrammarSpec": ".structured",
    "InvalidConfig": ".config",
    "LLM": ".llm",
    "LoadedModel": ".loading",
    "ModelRunner": ".model_runner",
    "RequestOutput": ".outputs",
    "RequestRefused": ".scheduler",
    "SamplingParams": "..stages.sampling_params",
    "Scheduler": ".scheduler",
    "SchedulerConfig": ".scheduler",
    "ServingLoop": ".serving_loop",
    "StageSet": ".stage_set",
    "build_runner": ".model_runner",
    "load_model": ".loading",
}

__all__ = [
    "LLM",
    "EngineConfig",
    "GrammarSpec",
    "InvalidConfig",
    "LoadedModel",
    "ModelRunner",
    "RequestOutput",
    "RequestRefused",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "ServingLoop",
    "StageSet",
    "build_runner",
    "load_model",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
