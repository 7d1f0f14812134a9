"""The soak, shortly: `make soak` runs it long, where growth can be told from warming up."""

from __future__ import annotations

import pytest
from endurance import Soak
from reference import References


@pytest.mark.parametrize("seed", range(2))
def test_no_token_is_lost_or_doubled(references: References, seed: int) -> None:
    report = Soak(references, seed, fault_rate=0.1).run(300)
    assert report.wrong == {}
    assert report.counts["tokens checked"] > 200
    assert report.counts["faults injected"] > 5
    assert report.counts["steps in flight"] > 20
