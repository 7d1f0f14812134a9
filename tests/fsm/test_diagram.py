"""The diagrams say what the tables say."""

import re

import pytest
from twostroke.fsm import LIFE_TRIGGERS, STEP_TRIGGERS, LifeState, StepState, life_diagram, step_diagram


def arrows(diagram: str) -> set[tuple[str, str, str]]:
    found = re.findall(r"^    (\w+) --> (\w+): (.+)$", diagram, flags=re.MULTILINE)
    return {(source, target, name) for source, target, names in found for name in names.split(", ")}


@pytest.mark.parametrize(
    ("diagram", "triggers", "states"),
    [(step_diagram, STEP_TRIGGERS, StepState), (life_diagram, LIFE_TRIGGERS, LifeState)],
)
def test_every_row_is_an_arrow_and_every_arrow_a_row(diagram, triggers, states) -> None:
    text = diagram()
    rows = {(source.name, (row.target or source).name, row.name) for row in triggers for source in row.sources}
    assert arrows(text) == rows
    assert all(state.name in text for state in states)


def test_step_diagram_is_mermaid_and_starts_idle() -> None:
    lines = step_diagram().splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> IDLE"]
    assert "    IDLE --> FORWARDED: execute" in lines
    assert "    FORWARDED --> SAMPLED: sample" in lines
