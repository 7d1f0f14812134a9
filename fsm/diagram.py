"""Mermaid text of the machines, rendered from the tables that run them."""

from __future__ import annotations

from collections.abc import Sequence

from .guard import S, Trigger
from .life import LIFE_TRIGGERS, LifeState
from .machine import STEP_TRIGGERS, StepState


def step_diagram() -> str:
    """The step machine as a mermaid state diagram."""
    return _render(STEP_TRIGGERS, StepState.IDLE)


def life_diagram() -> str:
    """The machine of a runner's life as a mermaid state diagram."""
    return _render(LIFE_TRIGGERS, LifeState.CREATED)


def _render(triggers: Sequence[Trigger[S]], initial: S) -> str:
    """One arrow for each pair of states, labelled with every trigger that goes there."""
    labels: dict[tuple[str, str], list[str]] = {}
    for trigger in triggers:
        for source in trigger.sources:
            target = source if trigger.target is None else trigger.target
            labels.setdefault((source.name, target.name), []).append(trigger.name)
    arrows = [f"    {source} --> {target}: {', '.join(names)}" for (source, target), names in labels.items()]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {initial.name}", *arrows])
