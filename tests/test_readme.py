"""What README.md shows is what there is: the diagram, the first snippet, the commands, the files it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from twostroke.fsm import step_diagram

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Fenced blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_diagram_is_rendered_from_the_machine() -> None:
    assert [block.strip() for block in blocks("mermaid")] == [step_diagram().strip()]


def test_the_first_snippet_is_short() -> None:
    code = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(code) <= 12


@pytest.mark.model
def test_the_first_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[0], "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "step of {'" in printed
    assert "The capital of France is" in printed


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), f"README links {target}, which is not there"


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z0-9-]+)`|\$ make ([a-z0-9-]+)", README)):
        name = next(part for part in target if part)
        assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE), f"README names make {name}"
