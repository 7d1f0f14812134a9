"""Garbage in steps and in what a scheduler is given: refused by the name of its request, and nothing changed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from driver import Driver, Wish
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.scheduler import InvalidSchedulerConfig, RequestRefused, Scheduler, SchedulerConfig
from twostroke.fsm import InputRefused, LifeState
from twostroke.stages.errors import InvalidSchedulerOutput
from twostroke.stages.io import CachedRequestData, NewRequestData, SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams

MakeRunner = Callable[..., ModelRunner]

REQUESTS: dict[str, tuple[Any, Any, Any]] = {
    "id is a number": (5, [1], SamplingParams()),
    "id is None": (None, [1], SamplingParams()),
    "id is half a character": ("\ud800", [1], SamplingParams()),
    "prompt is None": ("x", None, SamplingParams()),
    "prompt is text": ("x", "abc", SamplingParams()),
    "prompt of floats": ("x", [1.5] * 9, SamplingParams()),
    "prompt of None": ("x", [None] * 9, SamplingParams()),
    "prompt of lists": ("x", [[1]] * 9, SamplingParams()),
    "prompt of giants": ("x", [2**70] * 9, SamplingParams()),
    "negative prompt": ("x", [1, -5], SamplingParams()),
    "no parameters": ("x", [1], None),
    "parameters in a dict": ("x", [1], {"max_tokens": 3}),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_scheduler_refuses_what_would_break_a_later_step(case: str) -> None:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=24, num_kv_blocks=40, block_sizes=(4,)
    )
    scheduler = Scheduler(config)
    scheduler.add_request("good", [1, 2, 3], SamplingParams())
    with pytest.raises(RequestRefused):
        scheduler.add_request(*REQUESTS[case])
    scheduler.add_request("salted", [1] * 9, SamplingParams(), cache_salt="\ud800")
    assert dict(scheduler.schedule().num_scheduled_tokens) == {"good": 3, "salted": 9}


@pytest.mark.parametrize("sizes", [4, None, (), [], "4", (0,), ("4",), (4.0,), (True,)], ids=repr)
def test_block_sizes_are_a_list_of_numbers(sizes: Any) -> None:
    with pytest.raises(InvalidSchedulerConfig, match="block_sizes"):
        SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=16, max_model_len=24, num_kv_blocks=40, block_sizes=sizes
        )


@pytest.mark.parametrize("what", ["nothing", "an output on its way"])
def test_a_step_is_settled_with_its_output(make_runner: MakeRunner, what: str) -> None:
    """Two calls that are easily forgotten: sample_tokens, and get_output on what it returns."""
    runner = make_runner(async_scheduling=True)
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=24, num_kv_blocks=40, block_sizes=(4,)
    )
    scheduler = Scheduler(config)
    scheduler.add_request("r", [1, 2, 3], SamplingParams(max_tokens=2))
    scheduled = scheduler.schedule()
    nothing, late = runner.execute_model(scheduled), runner.sample_tokens()
    given: Any = late if what == "an output on its way" else nothing
    with pytest.raises(InputRefused, match=r"sample_tokens\(\) .* get_output\(\)"):
        scheduler.update_from_output(scheduled, given)
    (update,) = scheduler.update_from_output(scheduled, late.get_output())
    assert len(update.new_token_ids) == 1


def _step(runner: ModelRunner, **changes: Any) -> tuple[Driver, SchedulerOutput]:
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 5))
    driver.step({"a": 3})
    new = NewRequestData(req_id="n", prompt_token_ids=[1, 2], block_ids=[[39]])
    step = SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(req_ids=["a"], num_computed_tokens=[3]),
        scheduled_new_reqs=[evolve(new, **changes)],
        num_scheduled_tokens={"a": 1, changes.get("req_id", "n"): 2},
        total_num_scheduled_tokens=3,
    )
    return driver, step


NEW: dict[str, dict[str, Any]] = {
    "prompt of text": {"prompt_token_ids": ["x", "y"]},
    "prompt of floats": {"prompt_token_ids": [1.7, 2.0]},
    "prompt of lists": {"prompt_token_ids": [[1, 2]]},
    "prompt of giants": {"prompt_token_ids": [2**70, 1]},
    "no prompt": {"prompt_token_ids": None},
    "blocks of text": {"block_ids": [["q"]]},
    "blocks of floats": {"block_ids": [[3.5]]},
    "no blocks": {"block_ids": None},
    "blocks without groups": {"block_ids": [30]},
    "a block twice": {"block_ids": [[30, 30]]},
    "id is a number": {"req_id": 5},
    "id is half a character": {"req_id": "\ud800"},
    "no parameters": {"sampling_params": None},
    "parameters in a dict": {"sampling_params": {}},
}


@pytest.mark.parametrize("case", NEW)
def test_garbage_in_a_new_request_is_refused_by_its_name(runner: ModelRunner, case: str) -> None:
    """So that the others of the step can be served without it."""
    driver, step = _step(runner, **NEW[case])
    rows, tokens = dict(runner.parts.table.rows), runner.parts.table.num_tokens.copy()
    with pytest.raises(InvalidSchedulerOutput) as raised:
        runner.execute_model(step)
    assert raised.value.req_id == NEW[case].get("req_id", "n")
    assert runner.parts.table.rows == rows
    assert (runner.parts.table.num_tokens == tokens).all()
    driver.step({"a": 1})
    assert len(driver.requests["a"].outputs) == 2


CACHED: dict[str, dict[str, Any]] = {
    "a fraction of a scheduled token": {"count": 1.0},
    "a fraction of a computed token": {"num_computed_tokens": [2.5]},
    "computed tokens in a text": {"num_computed_tokens": ["3"]},
    "no computed tokens": {"num_computed_tokens": [None]},
    "new tokens in a text": {"new_token_ids": [["q"]]},
    "blocks of floats": {"new_block_ids": [[[1.5]]]},
    "blocks without groups": {"new_block_ids": [[30]]},
    "a block twice": {"new_block_ids": [[[30, 30]]]},
    "more outputs than there are": {"num_output_tokens": [7]},
    "outputs of floats": {"num_output_tokens": [0.5]},
    "resumed with more outputs than there are": {
        "num_output_tokens": [7],
        "num_computed_tokens": [0],
        "resumed_req_ids": {"a"},
        "new_block_ids": [[[30]]],
    },
    "resumed with fewer than none": {
        "num_output_tokens": [-2],
        "num_computed_tokens": [0],
        "resumed_req_ids": {"a"},
        "new_block_ids": [[[30]]],
    },
}


@pytest.mark.parametrize("case", CACHED)
def test_garbage_for_a_known_request_is_refused(runner: ModelRunner, case: str) -> None:
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 5))
    driver.step({"a": 3})
    garbage = {"num_computed_tokens": [3], **CACHED[case]}
    count = garbage.pop("count", 1)
    rows, tokens = dict(runner.parts.table.rows), runner.parts.table.token_ids_host.copy()
    with pytest.raises(InvalidSchedulerOutput):
        runner.execute_model(
            SchedulerOutput(
                scheduled_cached_reqs=CachedRequestData(req_ids=["a"], **garbage),
                num_scheduled_tokens={"a": count},
                total_num_scheduled_tokens=count,
            )
        )
    assert runner.parts.table.rows == rows
    assert (runner.parts.table.token_ids_host == tokens).all()
    driver.step({"a": 1})
    assert len(driver.requests["a"].outputs) == 2


@pytest.mark.parametrize("garbage", [None, {}, 5, "x"])
def test_a_step_that_is_no_scheduler_output(runner: ModelRunner, garbage: Any) -> None:
    with pytest.raises(InputRefused):
        runner.execute_model(garbage)


def test_a_single_tag_wakes_its_part(runner: ModelRunner) -> None:
    runner.sleep()
    runner.wake_up("kv_cache")
    assert runner.life is LifeState.READY
