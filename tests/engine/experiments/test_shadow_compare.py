"""What counts as a difference between two records, and what a copy of one keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from attrs import field, frozen
from twostroke.engine.shadow_compare import copied, exact, within


class Pair(NamedTuple):
    """Two anythings."""

    left: Any
    right: Any


@frozen(eq=False)
class Thing:
    """A record."""

    values: Any
    name: str = "x"
    _hidden: Any = None
    derived: int = field(init=False, default=3)


class Handle:
    """Cannot be compared."""


NAN = float("nan")


@pytest.mark.parametrize(
    ("real", "candidate"),
    [
        (Thing(torch.tensor([1.0, NAN, torch.inf])), Thing(torch.tensor([1.0, NAN, torch.inf]))),
        (Thing({"a": [np.arange(3), (1, "b")]}), Thing({"a": [np.arange(3), (1, "b")]})),
        (Pair(None, NAN), Pair(None, NAN)),
        (Thing(Handle()), Thing(Handle())),
        (torch.empty(0), torch.empty(0)),
    ],
    ids=["tensor", "nested", "nan", "opaque", "empty"],
)
def test_equal(real: Any, candidate: Any) -> None:
    assert exact(real, candidate) is None


@pytest.mark.parametrize(
    ("real", "candidate", "where"),
    [
        (Thing(1), Pair(1, 2), "Thing: Thing and Pair"),
        (Thing(torch.ones(2, 3)), Thing(torch.ones(3, 2)), r"Thing.values: \[2, 3\] torch.float32 and \[3, 2\]"),
        (Thing(torch.ones(2)), Thing(torch.ones(2).double()), "torch.float32 and .* torch.float64"),
        (Thing(torch.ones(2)), Thing(np.ones(2)), "Thing.values: Tensor and ndarray"),
        (
            Thing(torch.tensor([1, 2])),
            Thing(torch.tensor([1, 4])),
            r"1 of 2 differ, by 2 at most, first at \[1\]: 2 and 4",
        ),
        (Thing(np.array([True])), Thing(np.array([False])), "1 of 1 differ"),
        (Thing(torch.tensor([NAN])), Thing(torch.tensor([1.0])), "1 of 1 differ"),
        (Thing({"a": 1}), Thing({"a": 1, "b": 2}), r"Thing.values\['b'\]: Missing and int"),
        (Thing([1, 2]), Thing([1]), r"Thing.values.length: 2 and 1"),
        (Thing(1, "x", [0, Pair(1, 2)]), Thing(1, "x", [0, Pair(1, 3)]), r"Thing._hidden\[1\].right: 2 and 3"),
        (Thing(1, "x"), Thing(1, "y"), "Thing.name: 'x' and 'y'"),
        (Thing(Handle()), Thing(3), "Thing.values: Handle and int"),
    ],
)
def test_different(real: Any, candidate: Any, where: str) -> None:
    found = exact(real, candidate)
    assert found is not None
    with pytest.raises(AssertionError, match=where):
        raise AssertionError(found)


def test_tolerance_is_for_real_numbers_only() -> None:
    loose = within(absolute=0.1, relative=0.1)
    assert loose(Thing([torch.tensor(10.0), 1.0]), Thing([torch.tensor(11.0), 1.15])) is None
    assert loose(torch.tensor(10.0), torch.tensor(11.2)) is not None
    assert loose(1.0, 1.3) is not None
    assert loose(torch.tensor(100), torch.tensor(101)) is not None
    assert loose(100, 101) is not None


def test_a_copy_shares_no_tensor_and_nothing_else_is_copied() -> None:
    tensor, array, handle, plain = torch.ones(2), np.ones(2), Handle(), Thing(["a", 1])
    record = Thing({"t": tensor, "p": plain}, "n", Pair(array, [handle, tensor]))
    copy = copied(record)
    assert exact(record, copy) is None
    tensor.zero_()
    array.fill(0)
    assert copy.values["t"].tolist() == [1, 1]
    assert copy._hidden.left.tolist() == [1, 1]
    assert copy._hidden.right[1].tolist() == [1, 1]
    assert copy._hidden.right[0] is handle
    assert copy.values["p"] is plain
    assert isinstance(copy._hidden, Pair)
