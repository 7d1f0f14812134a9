"""update_states: who is in the table after a step, with which tokens and blocks, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from twostroke.fsm import Transaction
from twostroke.stages.errors import InvalidSchedulerOutput
from twostroke.stages.io import CachedRequestData, SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams


def start(kit: Any, build: Any, **prompts: list[int]) -> None:
    """Add requests whose whole prompt is computed and one token (9) sampled."""
    blocks = iter(range(1, 31))
    news = [build.new(req_id, prompt, [next(blocks) for _ in range(2)]) for req_id, prompt in prompts.items()]
    kit.step(build.output({r: len(p) for r, p in prompts.items()}, news), dict.fromkeys(prompts, 9))


def test_new_request_fills_its_row(kit: Any, build: Any) -> None:
    batch = kit.step(build.output({"a": 3}, [build.new("a", [5, 6, 7, 8, 9], [3, 4], computed=1)]))
    assert batch.req_ids == ["a"]
    assert batch.num_computed_tokens.tolist() == [1]
    assert batch.num_scheduled_tokens.tolist() == [3]
    assert kit.tokens("a") == [5, 6, 7, 8, 9]
    assert kit.blocks("a") == [3, 4]


def test_batch_order_follows_the_lists_not_the_dict(kit: Any, build: Any) -> None:
    start(kit, build, a=[1, 2], b=[3, 4])
    batch = kit.step(build.output({"c": 2, "b": 1, "a": 1}, [build.new("c", [1, 2], [9])], build.cached("ab", [2, 2])))
    assert list(batch.req_ids) == ["a", "b", "c"]
    assert batch.num_scheduled_tokens.tolist() == [1, 1, 2]


def test_blocks_are_appended(kit: Any, build: Any) -> None:
    start(kit, build, a=[1, 2, 3])
    kit.step(build.output({"a": 1}, cached=build.cached("a", [3], [[17]])))
    assert kit.blocks("a") == [1, 2, 17]


def test_finished_before_new_with_the_same_id(kit: Any, build: Any) -> None:
    start(kit, build, x=[1, 2, 3])
    params = SamplingParams(temperature=0.0, allowed_token_ids=[7])
    again = build.new("x", [4, 5], [20], params=params)
    kit.step(build.output({"x": 2}, [again], finished_req_ids={"x"}))
    assert kit.tokens("x") == [4, 5]
    assert kit.blocks("x") == [20]
    assert kit.table.num_live == 1
    assert kit.table.num_free_rows == kit.table.num_rows - 2


def test_unknown_and_repeated_finished_ids_are_no_ops(kit: Any, build: Any) -> None:
    start(kit, build, a=[1, 2])
    for _ in range(2):
        kit.step(build.output({}, finished_req_ids={"a", "ghost"}, preempted_req_ids={"other"}))
    assert not kit.table.records
    assert not kit.table.rows


def test_preempted_then_resumed_gets_a_fresh_row_and_its_tokens(kit: Any, build: Any) -> None:
    start(kit, build, a=[1, 2, 3], b=[4, 5])
    kit.step(build.output({"b": 1}, cached=build.cached("b", [2]), preempted_req_ids={"a"}), {"b": 8})
    assert "a" not in kit.table.rows
    assert kit.table.records["a"].saved_tokens.tolist() == [1, 2, 3, 9]
    resumed = build.cached("ab", [0, 3], [[8, 9], None], resumed_req_ids={"a"}, num_output_tokens=[1, 2])
    batch = kit.step(build.output({"a": 4, "b": 1}, cached=resumed))
    assert kit.tokens("a") == [1, 2, 3, 9]
    assert kit.blocks("a") == [8, 9]
    assert list(batch.req_ids) == ["b", "a"], "continued requests come first"
    assert batch.num_computed_tokens.tolist() == [3, 0]


def test_resumed_without_a_word_of_preemption(kit: Any, build: Any) -> None:
    start(kit, build, a=[1, 2, 3])
    resumed = build.cached("a", [0], [[8]], resumed_req_ids={"a"}, all_token_ids={"a": [1, 2, 3, 9]})
    kit.step(build.output({"a": 2}, cached=resumed))
    assert kit.tokens("a") == [1, 2, 3, 9]
    assert kit.blocks("a") == [8]
    assert kit.table.num_free_rows == kit.table.num_rows - 2


def test_preempted_request_may_come_back_as_new_with_all_its_tokens(kit: Any, build: Any) -> None:
    start(kit, build, a=[1, 2, 3])
    seed = kit.table.records["a"].seed
    again = build.new("a", [1, 2, 3], [5], prefill_token_ids=[1, 2, 3, 9])
    kit.step(build.output({"a": 4}, [again], preempted_req_ids={"a"}))
    row = kit.table.rows["a"]
    assert kit.tokens("a") == [1, 2, 3, 9]
    assert kit.table.num_prompt_tokens[row] == 3
    assert kit.table.records["a"].seed == seed


def test_rewind_drops_the_latest_outputs(kit: Any, build: Any) -> None:
    start(kit, build, a=[1, 2])
    kit.step(build.output({"a": 1}, cached=build.cached("a", [2], num_output_tokens=[1])), {"a": 8})
    assert kit.tokens("a") == [1, 2, 9, 8]
    kit.step(build.output({"a": 2}, cached=build.cached("a", [1], num_output_tokens=[1])))
    assert kit.tokens("a") == [1, 2, 9]
    assert kit.table.num_computed_tokens[kit.table.rows["a"]] == 1


def test_new_token_ids_are_written_where_they_belong_once(kit: Any, build: Any) -> None:
    start(kit, build, a=[1, 2])
    for _ in range(2):
        kit.step(build.output({"a": 1}, cached=build.cached("a", [2], new_token_ids=[[7]])))
        assert kit.tokens("a") == [1, 2, 7]


def test_unseeded_requests_draw_their_seed_once_and_apart(kit: Any, build: Any) -> None:
    start(kit, build, a=[1, 2], b=[1, 2])
    seeds = {req_id: record.seed for req_id, record in kit.table.records.items()}
    assert seeds["a"] != seeds["b"]
    kit.step(build.output({}, preempted_req_ids={"a"}))
    kit.step(build.output({"a": 3}, cached=build.cached("a", [0], [[8]], resumed_req_ids={"a"})))
    assert kit.table.records["a"].seed == seeds["a"]


REFUSALS = {
    "unknown id": (lambda b: b.output({"z": 1}, cached=b.cached("z", [0])), "z", "unknown"),
    "live id as new": (lambda b: b.output({"a": 2}, [b.new("a", [1, 2])]), "a", "while it is live"),
    "beyond what is known": (lambda b: b.output({"a": 2}, cached=b.cached("a", [3])), "a", "beyond what is known"),
    "beyond the length": (
        lambda b: b.output({"n": 17}, [b.new("n", range(17), range(1, 6))]),
        "n",
        "exceed max_model_len 16",
    ),
    "token budget": (lambda b: b.output({"n": 33}, [b.new("n", range(33))]), None, "max_num_batched_tokens 32"),
    "too many requests": (
        lambda b: b.output({f"n{i}": 1 for i in range(5)}, [b.new(f"n{i}", [1]) for i in range(5)]),
        None,
        "max_num_seqs 4",
    ),
    "too many live requests": (
        lambda b: b.output({f"n{i}": 1 for i in range(3)}, [b.new(f"n{i}", [1], [9 + i]) for i in range(3)]),
        None,
        "5 live requests",
    ),
    "two new requests in one block": (
        lambda b: b.output({"m": 3, "n": 3}, [b.new("m", [1] * 3, [12]), b.new("n", [1] * 3, [12])]),
        "n",
        "given block 12 to write to, and so is 'm'",
    ),
    "a new request in a block that another one gets": (
        lambda b: b.output({"a": 1, "n": 3}, [b.new("n", [1] * 3, [12])], b.cached("a", [3], [[12]])),
        "a",
        "given block 12 to write to, and so is 'n'",
    ),
    "one block for two": (
        lambda b: b.output({"a": 1, "b": 1}, cached=b.cached(["a", "b"], [3, 2], [[12], [12]])),
        "b",
        "given block 12 to write to, and so is 'a'",
    ),
    "block outside the pool": (lambda b: b.output({"n": 2}, [b.new("n", [1, 2], [32])]), "n", "block 32"),
    "null block": (lambda b: b.output({"a": 1}, cached=b.cached("a", [3], [[0]])), "a", "block 0"),
    "negative block": (lambda b: b.output({"a": 1}, cached=b.cached("a", [3], [[-1]])), "a", "block -1"),
    "too few blocks": (lambda b: b.output({"n": 5}, [b.new("n", [1] * 5, [3])]), "n", "too few"),
    "too many blocks": (
        lambda b: b.output({"a": 1}, cached=b.cached("a", [3], [[5, 6, 7]])),
        "a",
        "more than the 4",
    ),
    "blocks for another number of groups": (
        lambda b: b.output({"n": 1}, [evolve(b.new("n", [1]), block_ids=([1], [2]))]),
        "n",
        "2 KV-cache groups",
    ),
    "id outside the vocabulary": (lambda b: b.output({"n": 2}, [b.new("n", [1, 50])]), "n", "vocabulary of 50"),
    "negative id": (lambda b: b.output({"n": 2}, [b.new("n", [1, -1])]), "n", "vocabulary of 50"),
    "empty prompt": (lambda b: b.output({"n": 1}, [b.new("n", [])]), "n", "empty prompt"),
    "no tokens": (lambda b: b.output({"a": 0, "b": 1}, cached=b.cached("ab", [3, 2])), "a", "at least one"),
    "negative tokens": (lambda b: b.output({"a": -1, "b": 2}, cached=b.cached("ab", [3, 1])), "a", "at least one"),
    "negative computed": (lambda b: b.output({"a": 1}, cached=b.cached("a", [-1])), "a", "num_computed_tokens is -1"),
    "wrong total": (lambda b: b.output({"a": 1}, cached=b.cached("a", [3]), total=2), None, "sum to 1"),
    "scheduled but not listed": (
        lambda b: b.output({"a": 1, "q": 1}, cached=b.cached("a", [3])),
        "q",
        "neither list",
    ),
    "listed but not scheduled": (lambda b: b.output({"a": 1}, cached=b.cached("ab", [3, 2])), "b", "no entry"),
    "listed twice": (lambda b: b.output({"a": 1}, cached=b.cached("aa", [3, 3])), None, "twice"),
    "finished and continued": (
        lambda b: b.output({"a": 1}, cached=b.cached("a", [3]), finished_req_ids={"a"}),
        "a",
        "very step that finishes it",
    ),
    "preempted and continued": (
        lambda b: b.output({"a": 1}, cached=b.cached("a", [3]), preempted_req_ids={"a"}),
        "a",
        "was preempted",
    ),
    "resumed without blocks": (
        lambda b: b.output({"a": 1}, cached=b.cached("a", [3], [None], resumed_req_ids={"a"})),
        "a",
        "without block ids",
    ),
    "resumed with another prompt": (
        lambda b: b.output(
            {"a": 1}, cached=b.cached("a", [0], [[3]], resumed_req_ids={"a"}, all_token_ids={"a": [9, 9, 9]})
        ),
        "a",
        "does not start with its prompt",
    ),
    "ragged lists": (lambda b: b.output({"a": 1}, cached=b.cached("a", [3, 4])), None, "2 entries for 1"),
    "resumed but not scheduled": (
        lambda b: b.output({"a": 1}, cached=b.cached("a", [3], resumed_req_ids={"b"})),
        "b",
        "not scheduled",
    ),
    "more outputs than known": (
        lambda b: b.output({"a": 1}, cached=b.cached("a", [3], num_output_tokens=[5])),
        "a",
        "the scheduler counts 8",
    ),
    "drafts": (
        lambda b: b.output({"a": 1}, cached=b.cached("a", [3]), scheduled_spec_decode_tokens={"a": [1]}),
        "a",
        "scheduled_spec_decode_tokens",
    ),
    "LoRA": (
        lambda b: b.output({"n": 1}, [b.new("n", [1], lora_request="adapter")]),
        "n",
        "lora_request",
    ),
    "sampling parameter outside the vocabulary": (
        lambda b: b.output({"n": 1}, [b.new("n", [1], params=SamplingParams(allowed_token_ids=[50]))]),
        "n",
        "allowed_token_ids",
    ),
    "prompt logprobs behind a prefix hit": (
        lambda b: b.output({"n": 1}, [b.new("n", [1] * 5, computed=4, params=SamplingParams(prompt_logprobs=1))]),
        "n",
        "prompt_logprobs",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_whole_before_anything_changes(kit: Any, build: Any, case: str) -> None:
    start(kit, build, a=[1, 2, 3], b=[4, 5])
    before = kit.snapshot()
    make, req_id, text = REFUSALS[case]
    refused: SchedulerOutput = make(build)
    if req_id is not None:  # a good new request in the same step must not get through either
        counts = {**refused.num_scheduled_tokens, "good": 1}
        refused = evolve(
            refused,
            scheduled_new_reqs=[*refused.scheduled_new_reqs, build.new("good", [1], [9])],
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
        )
    transaction = Transaction(2)
    with pytest.raises(InvalidSchedulerOutput, match=text) as raised:
        kit.update_states(refused, transaction)
    assert raised.value.req_id == req_id
    assert kit.snapshot() == before
    transaction.rollback()
    assert kit.snapshot() == before


def test_rollback_restores_every_kind_of_change(kit: Any, build: Any) -> None:
    start(kit, build, a=[1, 2, 3], b=[4, 5], c=[6], d=[7])
    kit.step(build.output({}, preempted_req_ids={"d"}))
    before = kit.snapshot()
    changes = build.output(
        {"a": 1, "d": 2, "n": 2},
        [build.new("n", [1, 2], [20], params=SamplingParams(seed=3, prompt_logprobs=1))],
        CachedRequestData(
            req_ids=["a", "d"],
            resumed_req_ids={"d"},
            num_computed_tokens=[2, 0],
            new_block_ids=[([21],), ([22],)],
            num_output_tokens=[0, 1],
            all_token_ids={"d": [7, 9]},
        ),
        finished_req_ids={"b"},
        preempted_req_ids={"c"},
    )
    transaction = Transaction(3)
    kit.update_states(changes, transaction)
    assert kit.snapshot() != before
    transaction.rollback()
    assert kit.snapshot() == before
    batch = kit.step(changes)
    assert list(batch.req_ids) == ["a", "d", "n"]


def test_U2_recycled_row_is_clean(kit: Any, build: Any) -> None:
    rich = SamplingParams(
        temperature=0.7,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={3: 5.0},
        allowed_token_ids=[7],
        bad_words_token_ids=[[4, 5]],
        min_tokens=3,
        stop_token_ids=[2],
        logprobs=2,
        prompt_logprobs=2,
        seed=11,
    )
    for turn in range(2 * kit.table.num_rows):
        req_id = f"r{turn}"
        kit.step(build.output({req_id: 3}, [build.new(req_id, [1, 2, 3], params=rich)]))
        row = kit.table.rows[req_id]
        assert not kit.columns.is_default(row)
        kit.step(build.output({}, finished_req_ids={req_id}))
        assert kit.columns.is_default(row)
        assert not kit.table.owes_prompt_logprobs[row]
        assert not any(array[row] for array in (kit.table.num_tokens, kit.table.num_prompt_tokens))
        assert kit.table.block_tables[0].counts[row] == 0
    kit.step(build.output({"plain": 1}, [build.new("plain", [1])]))
    plain = kit.columns.rows[kit.table.rows["plain"]]
    assert plain["flags"] == 0
    assert sorted(kit.table._free_rows + list(kit.table.rows.values())) == list(range(1, kit.table.num_rows))


def test_rows_freed_in_a_step_are_not_given_out_in_it(kit: Any, build: Any) -> None:
    start(kit, build, a=[1], b=[1], c=[1], d=[1])
    old = set(kit.table.rows.values())
    news = [build.new(f"n{i}", [1], [20 + i]) for i in range(4)]
    kit.step(build.output({f"n{i}": 1 for i in range(4)}, news, finished_req_ids=set("abcd")))
    assert old.isdisjoint(kit.table.rows.values())


def test_several_groups_have_tables_of_their_own(make_kit: Any, build: Any) -> None:
    kit = make_kit(groups=2)
    data = evolve(build.new("a", [1, 2, 3]), block_ids=([1], [2]))
    kit.step(build.output({"a": 3}, [data]), {"a": 4})
    kit.step(
        build.output(
            {"a": 1}, cached=CachedRequestData(req_ids=["a"], num_computed_tokens=[3], new_block_ids=[([5], [6])])
        )
    )
    assert kit.blocks("a", 0) == [1, 5]
    assert kit.blocks("a", 1) == [2, 6]


def test_numpy_inputs_are_as_good_as_lists(kit: Any, build: Any) -> None:
    data = evolve(build.new("a", [1]), prompt_token_ids=np.array([1, 2, 3]), block_ids=(np.array([4]),))
    kit.step(build.output({"a": 3}, [data]))
    assert kit.tokens("a") == [1, 2, 3]
    assert kit.blocks("a") == [4]


def test_new_requests_may_share_the_blocks_that_are_computed(kit: Any, build: Any) -> None:
    start(kit, build, a=[1, 2, 3, 4, 5])
    shared = kit.blocks("a")[0]
    news = [build.new(req_id, [1, 2, 3, 4, 6], [shared, own], computed=4) for req_id, own in (("m", 20), ("n", 21))]
    kit.step(build.output({"m": 1, "n": 1}, news))
    assert [kit.blocks(req_id)[0] for req_id in "amn"] == [shared] * 3
