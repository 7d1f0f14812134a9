"""Chapter B: a batch in micro-batches gives what the whole batch gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from driver import Driver, Served, Wish
from modes import PARAMS
from twostroke.engine.model_runner import ModelRunner
from twostroke.stages.forward_context import Model
from twostroke.stages.records import PreparedInputs, UBatchSlices

MakeRunner = Callable[..., ModelRunner]
ServeEach = Callable[..., dict[str, Served]]
EAGER = {"ubatch_decode_threshold": 2, "ubatch_prefill_threshold": 2}
KINDS = [PARAMS["greedy"], PARAMS["prompt_logprobs"], PARAMS["seeded"], PARAMS["penalised"]]


def watch_splits(runner: ModelRunner) -> list[int]:
    """How many micro-batches each step had."""
    splits: list[int] = []

    def count(ubatches: UBatchSlices) -> None:
        splits.append(len(ubatches.slices))

    runner.stages.insert(count, after="ubatch_slice", name="count_ubatches")
    return splits


@pytest.mark.parametrize(
    ("lengths", "num_ubatches"),
    [((2, 9, 3, 1), 2), ((2, 9, 3, 1), 5), ((10,), 2), ((10,), 3), ((3, 10), 2), ((1, 1, 1, 1), 3), ((15, 1), 3)],
)
def test_B1_B3_split_anywhere(
    make_runner: MakeRunner, serve_each: ServeEach, two_groups: Model, lengths: Sequence[int], num_ubatches: int
) -> None:
    """Borders fall inside requests and between them; two KV-cache groups have metadata of their own in each part."""
    runner = make_runner(model=two_groups, num_ubatches=num_ubatches, **EAGER)
    splits = watch_splits(runner)
    wishes = [
        Wish(f"r{index}", tuple((index + 3 * place) % 60 for place in range(length)), 4, KINDS[index])
        for index, length in enumerate(lengths)
    ]
    driver = Driver(runner)
    driver.add(*wishes)
    driver.step({wish.req_id: len(wish.prompt) for wish in wishes})
    for _ in range(3):
        driver.step({wish.req_id: 1 for wish in wishes})
    alone = serve_each(wishes, model=two_groups)
    for wish in wishes:
        driver.served(wish.req_id).assert_equals(alone[wish.req_id])
    assert splits[0] == (num_ubatches if sum(lengths) >= num_ubatches else 1)


def test_B3_a_request_that_is_cut_gets_its_logits_once(make_runner: MakeRunner) -> None:
    runner = make_runner(num_ubatches=2, **EAGER)
    rows: list[tuple[int, ...]] = []

    def note(inputs: PreparedInputs) -> None:
        rows.append((len(inputs.sampling_reqs), len(inputs.logits_indices_host)))

    runner.stages.insert(note, after="prepare_inputs", name="note")
    splits = watch_splits(runner)
    driver = Driver(runner)
    driver.add(Wish("cut", tuple(range(10)), 2), Wish("beside", (1, 2), 2))
    driver.step({"cut": 10})
    driver.step({"cut": 1, "beside": 2})
    assert splits == [2, 2]
    assert rows == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("changes", "lengths", "split"),
    [
        pytest.param({}, (1,), False, id="one_token"),
        pytest.param({}, (2,), True, id="two_tokens"),
        pytest.param({"num_ubatches": 3}, (2,), False, id="fewer_tokens_than_parts"),
        pytest.param({"ubatch_decode_threshold": 0, "ubatch_prefill_threshold": 0}, (1,), False, id="no_threshold"),
        pytest.param(
            {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": (8,)}, (3,), False, id="a_part_of_padding"
        ),
        pytest.param(
            {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": (8,)}, (5,), True, id="a_padded_last_part"
        ),
        pytest.param({"ubatch_prefill_threshold": 6}, (3, 2), False, id="prefill_below_its_threshold"),
        pytest.param({"ubatch_decode_threshold": 9}, (3, 3), True, id="prefill_is_no_decode"),
    ],
)
def test_B4_B5_which_steps_are_split(
    make_runner: MakeRunner, serve_each: ServeEach, changes: dict[str, Any], lengths: Sequence[int], split: bool
) -> None:
    runner = make_runner(**{"num_ubatches": 2, **EAGER, **changes})
    splits = watch_splits(runner)
    wishes = [Wish(f"r{index}", tuple(range(length)), 1) for index, length in enumerate(lengths)]
    driver = Driver(runner)
    driver.add(*wishes)
    driver.step({wish.req_id: len(wish.prompt) for wish in wishes})
    assert [count > 1 for count in splits] == [split]
    alone = serve_each(wishes)
    for wish in wishes:
        driver.served(wish.req_id).assert_equals(alone[wish.req_id])
