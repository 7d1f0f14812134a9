"""Chapter P: which tokens a step computes, at which positions, and whose logits it needs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from driver import Driver, Served, Wish
from modes import MODES, PARAMS
from twostroke.engine.config import EngineConfig, InvalidConfig
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.scheduler import FinishReason, Scheduler, SchedulerConfig
from twostroke.stages.errors import InvalidSchedulerOutput
from twostroke.stages.forward_context import Model
from twostroke.stages.io import CachedRequestData, NewRequestData, SchedulerOutput
from twostroke.stages.records import Batch, ExecuteModelState
from twostroke.stages.sampling_params import SamplingParams

MakeRunner = Callable[..., ModelRunner]
ServeEach = Callable[..., dict[str, Served]]
FinishAll = Callable[[Driver], dict[str, Served]]
GREEDY = SamplingParams(temperature=0.0, logprobs=2)


@pytest.mark.parametrize("kind", ["seeded", "unseeded", "masked"])
def test_P2_a_seeded_stream_goes_on_after_preemption(
    runner: ModelRunner, serve_each: ServeEach, finish_all: FinishAll, kind: str
) -> None:
    wish = Wish("r", (1, 2, 3, 4), 6, PARAMS[kind])
    driver = Driver(runner)
    driver.add(wish)
    driver.step({"r": 4})
    driver.step({"r": 1})
    driver.step({"r": 1})
    driver.step({}, preempted=["r"])
    driver.step({"r": 2})
    driver.step({}, preempted=["r"])
    finish_all(driver)["r"].assert_equals(serve_each([wish])["r"])


@pytest.mark.parametrize("mode", ["eager", "full", "block_size_2", "block_size_7"])
def test_P1_one_token_chunks_of_a_prompt_are_no_decodes(
    make_runner: MakeRunner, serve_each: ServeEach, finish_all: FinishAll, mode: str
) -> None:
    """They look like a uniform decode step to the dispatcher, beside a real one, and yet sample nothing."""
    wishes = [Wish("chunked", tuple(range(9)), 4, PARAMS["seeded"]), Wish("decoding", (5, 6), 12, PARAMS["penalised"])]
    driver = Driver(make_runner(**MODES[mode]))
    driver.add(*wishes)
    driver.step({"decoding": 2})
    for done in range(8):
        driver.step({"chunked": 1, "decoding": 1})
        assert driver.requests["chunked"].outputs == [], f"sampled after {done + 1} of 9 prompt tokens"
    driver.step({"decoding": 1, "chunked": 1})
    assert len(driver.requests["chunked"].outputs) == 1
    alone = serve_each(wishes)
    for req_id, served in finish_all(driver).items():
        served.assert_equals(alone[req_id])


@pytest.mark.parametrize(("prompt_len", "block_size"), [(8, 4), (4, 4), (14, 7), (6, 2), (12, 1)])
def test_P3_a_prompt_that_is_cached_whole(
    make_runner: MakeRunner, serve_each: ServeEach, finish_all: FinishAll, prompt_len: int, block_size: int
) -> None:
    """Its last token is computed again; to compute none is refused, and so is a step of none among others."""
    runner = make_runner(block_size=block_size)
    wish = Wish("hit", tuple(range(3, 3 + prompt_len)), 4, PARAMS["seeded"])
    driver = Driver(runner)
    driver.add(Wish("first", wish.prompt, 9))
    driver.step({"first": prompt_len})
    blocks = [list(ids)[: -(-prompt_len // block_size)] for ids in driver.requests["first"].blocks]

    def hit(computed: int, count: int) -> SchedulerOutput:
        data = NewRequestData(
            req_id="hit",
            prompt_token_ids=wish.prompt,
            block_ids=blocks,
            num_computed_tokens=computed,
            sampling_params=wish.params,
        )
        beside = CachedRequestData(req_ids=["first"], num_computed_tokens=[prompt_len], new_block_ids=[None])
        return SchedulerOutput(
            scheduled_new_reqs=[data],
            scheduled_cached_reqs=beside,
            num_scheduled_tokens={"hit": count, "first": 1},
            total_num_scheduled_tokens=count + 1,
        )

    driver.output({"first": 1})
    for computed, count in ((prompt_len, 0), (prompt_len, 1), (prompt_len + 1, 1)):
        with pytest.raises(InvalidSchedulerOutput, match="'hit'"):
            runner.execute_model(hit(computed, count))
        assert set(runner.parts.table.rows) == {"first"}
    driver.add(wish)
    request = driver.requests["hit"]
    request.computed, request.blocks = prompt_len - 1, [list(ids) for ids in blocks]
    # The shared last block is written again with what it holds already.
    driver.step({"hit": 1})
    driver.requests.pop("first")
    driver.finished.append("first")
    assert len(request.outputs) == 1
    # From here on it writes positions that "first" had not reached.
    finish_all(driver)["hit"].assert_equals(serve_each([wish], block_size=block_size)["hit"])


@pytest.mark.parametrize(("mode", "short_by"), [("eager", 1), ("full", 2), ("block_size_7", 3), ("block_size_2", 1)])
def test_P4_the_last_legal_token_is_computed_and_the_next_refused(
    make_runner: MakeRunner, serve_each: ServeEach, mode: str, short_by: int
) -> None:
    runner = make_runner(**MODES[mode], max_num_batched_tokens=24)
    limit = 24
    wish = Wish("r", tuple(range(limit - short_by)), short_by, PARAMS["penalised"])
    driver = Driver(runner)
    driver.add(wish)
    driver.step({"r": limit - short_by})
    for _ in range(short_by - 1):
        driver.step({"r": 1})
    driver.served("r").assert_equals(serve_each([wish], max_num_batched_tokens=24)["r"])
    driver.step({"r": 1})
    assert len(driver.requests["r"].tokens) == limit + 1, "the token at the very last position is sampled"
    request = driver.requests["r"]
    too_far = SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(req_ids=["r"], num_computed_tokens=[limit]),
        num_scheduled_tokens={"r": 1},
        total_num_scheduled_tokens=1,
    )
    with pytest.raises(InvalidSchedulerOutput, match="max_model_len 24"):
        runner.execute_model(too_far)
    driver.finish("r")
    driver.step({})
    assert request.tokens[:limit] == [*wish.prompt, *request.outputs][:limit]


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "num_outputs"), [(23, 1, 1), (23, 9, 1), (23, None, 1), (1, None, 23)]
)
def test_P4_a_request_ends_at_the_models_length(
    runner: ModelRunner, prompt_len: int, max_tokens: int | None, num_outputs: int
) -> None:
    scheduler = _scheduler()
    scheduler.add_request("r", range(prompt_len), SamplingParams(max_tokens=max_tokens, temperature=0.0))
    outputs, reason = _serve(scheduler, runner)["r"]
    assert (len(outputs), reason) == (num_outputs, FinishReason.LENGTH)


def _scheduler(**changes: object) -> Scheduler:
    limits: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 24,
        "num_kv_blocks": 40,
        "block_sizes": (4,),
    }
    return Scheduler(SchedulerConfig(**limits | changes))  # pyright: ignore[reportArgumentType]


def _serve(scheduler: Scheduler, runner: ModelRunner) -> dict[str, tuple[list[int], FinishReason | None]]:
    got: dict[str, tuple[list[int], FinishReason | None]] = {}
    while scheduler.has_work():
        scheduled = scheduler.schedule()
        if runner.execute_model(scheduled) is not None:
            continue
        for update in scheduler.update_from_output(scheduled, runner.sample_tokens().get_output()):
            tokens, _ = got.get(update.req_id, ([], None))
            got[update.req_id] = ([*tokens, *update.new_token_ids], update.finish_reason)
    return got


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        pytest.param({"max_num_batched_tokens": 3}, "max_num_batched_tokens 3", id="budget_below_requests"),
        pytest.param(
            {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": (17,)}, "capture_sizes", id="graph_too_large"
        ),
        pytest.param({"cudagraph_mode": "FULL", "cudagraph_capture_sizes": ()}, "capture_sizes", id="no_graph_size"),
        pytest.param({"max_model_len": 129}, "max_model_len 129", id="beyond_the_model"),
        pytest.param({"num_kv_blocks": 6}, "num_kv_blocks", id="longer_than_the_cache"),
    ],
)
def test_P8_limits_that_contradict_each_other_are_refused(
    make_runner: MakeRunner, changes: dict[str, object], name: str
) -> None:
    with pytest.raises(InvalidConfig, match=name):
        make_runner(**changes)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(("seqs", "tokens", "length"), [(1, 1, 24), (2, 2, 24), (3, 3, 24), (1, 16, 2), (9, 9, 24)])
def test_P8_automatic_graph_sizes_fit_the_largest_step(
    make_runner: MakeRunner, mode: str, seqs: int, tokens: int, length: int
) -> None:
    runner = make_runner(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        cudagraph_mode=mode,
        cudagraph_capture_sizes="auto",
    )
    sizes = runner.config.cudagraph_capture_sizes
    assert sizes
    assert not isinstance(sizes, str)
    assert max(sizes) <= min(tokens, seqs * length)
    driver = Driver(runner)
    driver.add(Wish("r", (1,), 1))
    driver.step({"r": 1})
    assert len(driver.requests["r"].outputs) == 1


@pytest.mark.parametrize("counts", [[(9, 5)], [(4, 1), (5, 4)], [(1, 1)] * 5 + [(4, 0)]])
def test_P10_hidden_states_are_those_of_their_request(make_runner: MakeRunner, counts: list[tuple[int, int]]) -> None:
    """Slices of a batch go by its own offsets, and nothing of an earlier batch is in them."""

    def hidden_states(wishes: list[Wish], steps: list[dict[str, int]]) -> dict[str, np.ndarray]:
        runner = make_runner()
        found: dict[str, list[np.ndarray]] = {}

        def keep(batch: Batch, state: ExecuteModelState) -> None:
            assert state.hidden_states is not None
            ends = np.cumsum(batch.num_scheduled_tokens)
            for req_id, start, end in zip(batch.req_ids, ends - batch.num_scheduled_tokens, ends, strict=True):
                found.setdefault(req_id, []).append(state.hidden_states[start:end].numpy().copy())

        runner.stages.insert(keep, after="forward", name="keep")
        driver = Driver(runner)
        driver.add(*wishes)
        for step in steps:
            driver.step(step)
        return {req_id: np.concatenate(parts) for req_id, parts in found.items()}

    first, second = Wish("a", tuple(range(9)), 1), Wish("b", (9, 8, 7, 6, 5), 1)
    together = hidden_states(
        [first, second], [{k: n for k, n in zip("ba", (b, a), strict=True) if n} for a, b in counts]
    )
    for wish in (first, second):
        alone = hidden_states([wish], [{wish.req_id: len(wish.prompt)}])[wish.req_id]
        np.testing.assert_allclose(together[wish.req_id], alone, atol=1e-4)


@pytest.mark.parametrize("caching", [True, False])
def test_P10_results_of_two_calls_match_their_prompts(make_runner: MakeRunner, caching: bool) -> None:
    runner = make_runner()
    scheduler = _scheduler(enable_prefix_caching=caching, max_num_batched_tokens=5)
    prompts = {f"{call}{index}": [*range(3 + 2 * index), 50 + index] for call in "xy" for index in range(4)}
    results: dict[str, list[int]] = {}
    for call in "xy":
        for req_id in sorted(prompts, reverse=call == "y"):
            if req_id.startswith(call):
                scheduler.add_request(req_id, prompts[req_id], SamplingParams(max_tokens=5, temperature=0.0))
        results |= {req_id: tokens for req_id, (tokens, _) in _serve(scheduler, runner).items()}
    assert [results[f"x{index}"] for index in range(4)] == [results[f"y{index}"] for index in range(4)]
    assert len({tuple(tokens) for tokens in results.values()}) == 4
    assert bool(scheduler.stats().prefix_cache_hits) is caching


def test_P8_a_pool_must_hold_a_block_for_each_group(two_groups: Model) -> None:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 4, "async_scheduling": False}
    config = EngineConfig(**limits, num_kv_blocks=6)  # pyright: ignore[reportArgumentType]
    assert build_runner(config, model=two_groups).config.max_model_len == 8
    with pytest.raises(InvalidConfig, match="each of 2 groups"):
        build_runner(config.replace(num_kv_blocks=2), model=two_groups)
    with pytest.raises(InvalidConfig, match="max_model_len 9"):
        build_runner(config.replace(max_model_len=9), model=two_groups)
