"""The table of faults names each of them once, and every test that it names is there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "FAULTS.md").read_text(encoding="utf-8")
FAULTS = {
    "F": (1, 2, 3, 4, 6),
    "U": (1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 15, 16),
    "P": (1, 2, 3, 4, 7, 8, 10),
    "G": (1, 2, 3, 4, 6, 8, 9, 10, 11, 13, 14),
    "B": (1, 3, 4, 5),
    "K": (2, 3, 4, 5, 6, 7, 8, 9),
    "W": (1, 3, 4, 5, 6),
    "S": (1, 2, 3, 5, 7, 8, 9, 13, 14),
    "D": (1, 2, 3, 4, 5, 6, 7, 9, 10),
    "A": (2, 3, 4, 5, 7, 8, 10),
    "X": (1, 2, 3, 5, 6, 7, 8),
    "L": (1, 3, 4, 6, 8, 9, 10, 11),
    "T": (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13),
}
ROW = re.compile(r"^\| ([A-Z]\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/.]+\.py)::(\w+)`")
LATER = ("with speculation", "with pipeline parallelism", "with data parallelism", "there is no ring", "as W3")


def test_each_fault_is_named_once() -> None:
    named = Counter(row[1] for row in ROW.finditer(TABLE))
    assert named == Counter(f"{chapter}{number}" for chapter, numbers in FAULTS.items() for number in numbers)


def test_each_row_has_a_test_or_a_reason() -> None:
    for row in ROW.finditer(TABLE):
        assert NAMED.search(row[3]) or any(reason in row[3] for reason in LATER), row[1]


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED.findall(TABLE)}))
def test_every_test_that_is_named_exists(file: str) -> None:
    there = set(re.findall(r"^\s*(?:async )?def (test_\w+)", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE))
    assert {name for named, name in NAMED.findall(TABLE) if named == file} <= there


def test_every_test_named_after_a_fault_names_one_of_the_table() -> None:
    known = {f"{chapter}{number}" for chapter, numbers in FAULTS.items() for number in numbers}
    for path in TESTS.rglob("test_*.py"):
        for ids in re.findall(
            r"^\s*(?:async )?def test((?:_[A-Z]\d+)+)_", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert set(ids.split("_")[1:]) <= known, f"{path}: {ids}"
