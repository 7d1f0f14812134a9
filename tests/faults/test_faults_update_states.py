"""Chapter U: who is in the table, with which tokens, and what is left of whoever was there before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from driver import Driver, Served, Wish
from modes import MODES, PARAMS
from twostroke.engine.model_runner import ModelRunner
from twostroke.stages.errors import InvalidSchedulerOutput
from twostroke.stages.io import CachedRequestData, NewRequestData, SchedulerOutput
from twostroke.stages.records import Batch
from twostroke.stages.request_table import RequestRecord
from twostroke.stages.sampling_params import SamplingParams

MakeRunner = Callable[..., ModelRunner]
ServeEach = Callable[..., dict[str, Served]]
FinishAll = Callable[[Driver], dict[str, Served]]
AssertServed = Callable[..., None]


def test_U1_U11_a_request_never_changes_its_row(runner: ModelRunner, wishes: list[Wish]) -> None:
    """Nothing can be swapped or condensed wrongly where nothing moves."""
    rows: dict[str, set[int]] = {}

    def watch(batch: Batch) -> None:
        for req_id, row in zip(batch.req_ids, batch.rows.tolist(), strict=True):
            rows.setdefault(req_id, set()).add(row)

    runner.stages.insert(watch, after="update_states", name="watch")
    for seed in range(2):
        rows.clear()
        Driver(runner, seed).run_random(wishes, preempt=0.0)
        assert {req_id: len(seen) for req_id, seen in rows.items()} == {wish.req_id: 1 for wish in wishes}


class Ledger:
    """A stateful column, such as a thinking budget: who holds each row, checked on every call."""

    def __init__(self) -> None:
        self.holders: dict[int, str] = {}
        self.flushes = 0

    def add(self, row: int, request: RequestRecord) -> None:
        self.holders[row] = request.req_id

    def drop(self, row: int) -> None:
        self.holders.pop(row, None)

    def flush(self) -> None:
        self.flushes += 1


@pytest.mark.parametrize("seed", range(2))
def test_U11_a_columns_state_belongs_to_the_holder_of_its_row(
    runner: ModelRunner, wishes: list[Wish], seed: int
) -> None:
    ledger, table = Ledger(), runner.parts.table
    table.columns += (ledger,)

    def compare(batch: Batch) -> None:
        assert {req_id: ledger.holders[row] for req_id, row in table.rows.items()} == {r: r for r in table.rows}

    runner.stages.insert(compare, after="update_states", name="compare")
    Driver(runner, seed).run_random(wishes[:5], preempt=0.3)
    assert not ledger.holders
    assert ledger.flushes


def test_U3_the_order_of_the_dict_of_counts_is_moot(make_runner: MakeRunner) -> None:
    wishes = [Wish("a", (1, 2, 3), 3), Wish("b", (4,), 3), Wish("c", (5, 6, 7, 8, 9), 3, PARAMS["seeded"])]
    counts = {"a": 2, "b": 1, "c": 5}
    seen: set[Any] = set()
    for order in permutations(counts):
        driver = Driver(make_runner())
        driver.add(*wishes)
        output = driver.output(counts)
        driver.run(evolve(output, num_scheduled_tokens={req_id: counts[req_id] for req_id in order}))
        driver.run(evolve(driver.output({"b": 1, "c": 1, "a": 1}), num_scheduled_tokens=dict.fromkeys(order, 1)))
        seen.add(tuple(tuple(driver.requests[req_id].outputs) for req_id in "abc"))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        pytest.param("greedy", (4, 4, 5), id="greedy"),
        pytest.param("seeded", (1, 7, 1), id="seeded"),
        pytest.param("penalised", (8, 0, 10), id="penalised"),
        pytest.param("biased", (3, 5, 8), id="biased"),
    ],
)
def test_U4_U5_preempted_in_the_middle_and_resumed_in_chunks(
    runner: ModelRunner, serve_each: ServeEach, finish_all: FinishAll, kind: str, split: tuple[int, int, int]
) -> None:
    """Sampled tokens come back as known ones: nothing is sampled before the last of them is computed again."""
    first, second, again = split
    wish = Wish("r", (9, 8, 7, 6, 5, 4, 3, 2), 9, PARAMS[kind])
    alone = serve_each([wish])["r"]
    driver = Driver(runner)
    driver.add(wish, Wish("neighbour", (1, 2), 14))
    driver.step({"r": first, "neighbour": 2})
    if second:
        driver.step({"r": second, "neighbour": 1})
    driver.step({"r": 1, "neighbour": 1})
    driver.step({"r": 1})
    driver.step({"neighbour": 1}, preempted=["r"])
    while driver.requests["r"].left > 1:
        driver.step({"r": min(again, driver.requests["r"].left - 1), "neighbour": 1})
        assert len(driver.requests["r"].outputs) == 3, "a chunk that is not the last one sampled"
    driver.step({"r": 1})
    assert len(driver.requests["r"].outputs) == 4
    finish_all(driver)["r"].assert_equals(alone)


@pytest.mark.parametrize(("mode", "company"), [("eager", 0), ("full", 1), ("two_ubatches", 2)])
def test_U5_a_batch_of_resumed_requests_is_no_decode(
    make_runner: MakeRunner, serve_each: ServeEach, mode: str, company: int
) -> None:
    wishes = [Wish(f"r{index}", (3 + index, 2, 1), 13) for index in range(1 + company)]
    alone = serve_each(wishes)
    driver = Driver(make_runner(**MODES[mode]))
    driver.add(*wishes)
    driver.step({wish.req_id: 3 for wish in wishes})
    for _ in range(9):
        driver.step({wish.req_id: 1 for wish in wishes})
    driver.step({}, preempted=[wish.req_id for wish in wishes])
    for count in (5, 5, 2):
        driver.step({wish.req_id: count for wish in wishes})
        assert {len(driver.requests[wish.req_id].outputs) for wish in wishes} == {10}
    for _ in range(3):
        driver.step({wish.req_id: 1 for wish in wishes})
    for wish in wishes:
        driver.served(wish.req_id).assert_equals(alone[wish.req_id])


@pytest.mark.parametrize("pause", [1, 3])
def test_U7_a_request_may_sit_steps_out(
    runner: ModelRunner, serve_each: ServeEach, finish_all: FinishAll, assert_served: AssertServed, pause: int
) -> None:
    wishes = [Wish("on", (1, 2, 3), 9), Wish("off", (4, 5), 4, PARAMS["penalised"])]
    driver = Driver(runner)
    driver.add(*wishes)
    driver.step({"on": 3, "off": 2})
    for _ in range(pause):
        driver.step({"on": 1})
        assert "off" in runner.parts.table.rows
    driver.step({"off": 1})
    driver.step({})
    assert_served(finish_all(driver), serve_each(wishes))


@pytest.mark.parametrize("block_size", [1, 2, 5, 7, 8, 23, 24, 64])
def test_U10_the_block_table_is_as_wide_as_the_longest_request(make_runner: MakeRunner, block_size: int) -> None:
    runner = make_runner(block_size=block_size, num_kv_blocks=60)
    limit = 24
    driver = Driver(runner)
    driver.add(Wish("long", tuple(range(limit - 3)), 4), Wish("other", (1,), 4))
    driver.step({"long": 15, "other": 1})
    driver.step({"long": limit - 3 - 15})
    for _ in range(3):
        driver.step({"long": 1, "other": 1})
    assert len(driver.requests["long"].outputs) == 4
    table = runner.parts.table
    held = int(table.block_tables[0].counts[table.rows["long"]])
    assert held == -(-limit // block_size) == table.block_tables[0].max_blocks
    before = table.block_tables[0].blocks.copy()
    one_more = CachedRequestData(req_ids=["long"], num_computed_tokens=[limit], new_block_ids=[[[59]]])
    with pytest.raises(InvalidSchedulerOutput, match="'long'"):
        runner.execute_model(
            SchedulerOutput(
                scheduled_cached_reqs=one_more, num_scheduled_tokens={"long": 1}, total_num_scheduled_tokens=1
            )
        )
    assert (table.block_tables[0].blocks == before).all()


def test_U2_a_plain_request_in_the_row_of_a_rich_one(
    make_runner: MakeRunner, serve_each: ServeEach, finish_all: FinishAll
) -> None:
    """Every row is given to a request with every kind of restriction, and then to one with none."""
    runner = make_runner(max_num_seqs=1)
    plain = Wish("plain", (7, 8, 9), 5)
    alone = serve_each([plain])["plain"]
    rich = SamplingParams(
        temperature=0.5,
        seed=1,
        allowed_token_ids=[7, 8],
        logit_bias={7: 9.0},
        bad_words_token_ids=[[8, 8]],
        min_tokens=4,
        stop_token_ids=[5],
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        top_k=2,
        logprobs=5,
        prompt_logprobs=1,
    )
    for turn in range(runner.parts.table.num_rows):
        driver = Driver(runner, turn)
        driver.add(Wish("rich", (3, 2, 1), 3, rich))
        finish_all(driver)
        driver.add(plain)
        finish_all(driver)["plain"].assert_equals(alone)


UNSUPPORTED = {
    "lora_request": ({"lora_request": object()}, {}),
    "pooling_params": ({"pooling_params": object()}, {}),
    "prompt_embeds": ({"prompt_embeds": np.zeros((2, 8))}, {}),
    "mm_features": ({"mm_features": [object()]}, {}),
    "scheduled_encoder_inputs": ({}, {"scheduled_encoder_inputs": {"n": [0]}}),
    "scheduled_spec_decode_tokens": ({}, {"scheduled_spec_decode_tokens": {"n": [3]}}),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_W1_W3_W4_what_no_stage_computes_is_refused_by_name_and_never_ignored(
    runner: ModelRunner, finish_all: FinishAll, serve_each: ServeEach, name: str
) -> None:
    of_request, of_step = UNSUPPORTED[name]
    neighbour = Wish("neighbour", (1, 2, 3), 4)
    driver = Driver(runner)
    driver.add(neighbour)
    driver.step({"neighbour": 3})
    data = NewRequestData(req_id="n", prompt_token_ids=[1, 2], block_ids=[[39]], **of_request)
    step = SchedulerOutput(
        scheduled_new_reqs=[data], num_scheduled_tokens={"n": 2}, total_num_scheduled_tokens=2, **of_step
    )
    with pytest.raises(InvalidSchedulerOutput, match=name) as raised:
        runner.execute_model(step)
    assert raised.value.req_id == "n"
    assert set(runner.parts.table.records) == {"neighbour"}
    finish_all(driver)["neighbour"].assert_equals(serve_each([neighbour])["neighbour"])


def test_U8_repeated_and_unknown_ends_free_nothing_twice(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2), 5), Wish("b", (3, 4), 5))
    driver.step({"a": 2, "b": 2})
    driver.finish("a")
    free = runner.parts.table.num_free_rows
    for ended in (["a"], ["a", "ghost"], ["ghost"]):
        driver.finished = [*ended, *driver.finished]
        driver.step({"b": 1}, preempted=[])
        driver.finished = []
        assert runner.parts.table.num_free_rows == free + 1
    assert set(runner.parts.table.rows) == {"b"}


GARBLED = {
    "negative number of outputs": {"num_computed_tokens": [0], "num_output_tokens": [-2]},
    "tokens that do not start with the prompt": {"num_computed_tokens": [3], "all_token_ids": {"a": [9, 9, 9, 9]}},
    "new tokens over the prompt": {"num_computed_tokens": [0], "new_token_ids": [[9, 9, 9]]},
}


@pytest.mark.parametrize("case", GARBLED)
def test_K9_a_correction_cannot_reach_the_prompt(runner: ModelRunner, case: str) -> None:
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 5))
    driver.step({"a": 3})
    garbled = SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(req_ids=["a"], **GARBLED[case]),
        num_scheduled_tokens={"a": 1},
        total_num_scheduled_tokens=1,
    )
    with pytest.raises(InvalidSchedulerOutput, match="'a'"):
        runner.execute_model(garbled)
    driver.step({"a": 1})
    assert runner.parts.table.token_ids_host[runner.parts.table.rows["a"], :3].tolist() == [1, 2, 3]
