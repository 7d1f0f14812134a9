"""The serving loop: what comes out of a stream, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from twostroke.engine.scheduler import RequestRefused
from twostroke.engine.serving_loop import LoopState, ServingLoopDown
from twostroke.stages.errors import InvalidSamplingParams
from twostroke.stages.sampling_params import SamplingParams

Serve = Callable[..., Any]


def test_a_stream_adds_up_to_the_result(serve: Serve) -> None:
    handle = serve().loop.add("abc", SamplingParams(max_tokens=7))
    deltas = list(handle)
    whole = handle.result()
    assert whole.text == "abcabca" == "".join(delta.text for delta in deltas)
    assert whole.outputs[0].token_ids == tuple(token for delta in deltas for token in delta.outputs[0].token_ids)
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert (whole.outputs[0].finish_reason, whole.outputs[0].stop_reason) == ("length", None)
    assert (whole.prompt, whole.prompt_token_ids) == ("abc", (97, 98, 99))


def test_metrics_are_in_order(serve: Serve) -> None:
    metrics = serve().loop.add("abc").result().metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert 0 <= metrics.time_to_first_token <= metrics.latency


def test_L4_starting_with_nothing_to_do_idles(serve: Serve) -> None:
    bench = serve()
    threading.Event().wait(0.05)
    assert bench.loop.healthy
    assert bench.runner.num_steps == 0
    assert bench.loop.add("x", SamplingParams(max_tokens=2)).result().text == "xx"


@pytest.mark.parametrize(
    ("prompt", "text", "tokens"),
    [
        pytest.param("hi", "hi", b"hi", id="text"),
        pytest.param([104, 105], None, b"hi", id="token_ids"),
        pytest.param({"prompt_token_ids": [104, 105]}, None, b"hi", id="dict_of_token_ids"),
        pytest.param({"prompt": "hi"}, "hi", b"hi", id="dict_of_text"),
        pytest.param([{"role": "user", "content": "hi"}], "hi>", b"hi>", id="chat"),
    ],
)
def test_prompts(serve: Serve, prompt: Any, text: str | None, tokens: bytes) -> None:
    whole = serve().loop.add(prompt, SamplingParams(max_tokens=len(tokens))).result()
    assert (whole.prompt, whole.prompt_token_ids) == (text, tuple(tokens))
    assert whole.text == tokens.decode()


def test_end_of_sequence_ends_without_text(serve: Serve) -> None:
    loop = serve().loop
    output = loop.add([97, 256, 98], SamplingParams(max_tokens=9)).result().outputs[0]
    assert (output.text, output.token_ids, output.finish_reason) == ("a", (97, 256), "stop")
    ignoring = loop.add([97, 256, 98], SamplingParams(max_tokens=4, ignore_eos=True)).result().outputs[0]
    assert (ignoring.text, ignoring.finish_reason) == ("aba", "length")


def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(serve: Serve) -> None:
    loop = serve().loop
    output = loop.add("abc", SamplingParams(stop_token_ids=[99])).result().outputs[0]
    assert (output.text, output.token_ids, output.stop_reason) == ("ab", (97, 98, 99), 99)
    params = SamplingParams(stop_token_ids=[99], include_stop_str_in_output=True)
    assert loop.add("abc", params).result().text == "abc"


@pytest.mark.parametrize(
    ("include", "text"), [pytest.param(False, "one ", id="left_out"), pytest.param(True, "one two", id="kept")]
)
def test_stop_string_over_token_borders(serve: Serve, include: bool, text: str) -> None:
    bench = serve()
    params = SamplingParams(max_tokens=50, stop="two", include_stop_str_in_output=include)
    handle = bench.loop.add("one two three", params)
    seen = "".join(delta.text for delta in handle)
    output = handle.result().outputs[0]
    assert seen == output.text == text
    assert (output.finish_reason, output.stop_reason) == ("stop", "two")
    assert output.token_ids == tuple(b"one two")
    bench.settle()
    assert bench.runner.num_steps <= 7 + bench.loop.depth


def test_held_back_text_is_shown_at_the_end(serve: Serve) -> None:
    assert serve().loop.add("abc", SamplingParams(max_tokens=5, stop="abcd")).result().text == "abcab"


def test_stop_strings_do_not_count_within_min_tokens(serve: Serve) -> None:
    output = serve().loop.add("ab", SamplingParams(max_tokens=9, min_tokens=3, stop="b")).result().outputs[0]
    assert (output.text, output.token_ids) == ("aba", tuple(b"abab"))


def test_characters_of_several_tokens_come_whole(serve: Serve) -> None:
    handle = serve().loop.add("é→x", SamplingParams(max_tokens=6))
    texts = [delta.text for delta in handle]
    assert "".join(texts) == "é→x"
    assert all("\N{REPLACEMENT CHARACTER}" not in text for text in texts)


def test_an_unfinished_character_is_replaced_at_the_end(serve: Serve) -> None:
    assert serve().loop.add("→", SamplingParams(max_tokens=2)).result().text == "\N{REPLACEMENT CHARACTER}"


def test_without_detokenizing_there_are_only_tokens(serve: Serve) -> None:
    whole = serve().loop.add("ab", SamplingParams(max_tokens=3, detokenize=False)).result()
    assert (whole.text, whole.outputs[0].token_ids) == ("", tuple(b"aba"))


def test_no_max_tokens_goes_on_to_the_model_length(serve: Serve) -> None:
    output = serve(max_model_len=20).loop.add("abcd", SamplingParams(max_tokens=None)).result().outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (16, "length")


def test_logprobs_by_token(serve: Serve) -> None:
    handle = serve().loop.add("ab", SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=2))
    streamed = [position for delta in handle for position in delta.outputs[0].logprobs]
    whole = handle.result()
    assert streamed == list(whole.outputs[0].logprobs)
    assert [next(iter(position)) for position in streamed] == list(b"aba")
    assert streamed[0][97].logprob == -1.0
    assert (streamed[0][98].logprob, streamed[0][98].rank) == (-2.0, 2)
    assert whole.prompt_logprobs[0] is None
    assert list(whole.prompt_logprobs[1]) == [98, 99]
    assert serve().loop.add("ab").result().outputs[0].logprobs is None


def test_cached_tokens_are_reported(serve: Serve) -> None:
    loop = serve().loop
    assert loop.add("a" * 10).result().num_cached_tokens == 0
    assert loop.add("a" * 10).result().num_cached_tokens == 8


def test_n_completions_come_through_one_handle(serve: Serve) -> None:
    bench = serve()
    handle = bench.loop.add("abc", SamplingParams(n=3, max_tokens=5, seed=2**64 - 2), request_id="three")
    texts = {0: "", 1: "", 2: ""}
    for delta in handle:
        for output in delta.outputs:
            texts[output.index] += output.text
    whole = handle.result()
    assert texts == dict.fromkeys(range(3), "abcab")
    assert [output.index for output in whole.outputs] == [0, 1, 2]
    seeds = [bench.runner.params[f"three#{index}"].seed for index in range(3)]
    assert seeds == [2**64 - 2, 2**64 - 1, 0]
    assert all(bench.runner.params[f"three#{index}"].n == 1 for index in range(3))


def test_the_runner_gets_what_the_tokenizer_knows(serve: Serve) -> None:
    bench = serve()
    bench.loop.add("abc", SamplingParams(bad_words=["xy"]), request_id="r").result()
    params = bench.runner.params["r"]
    assert params.eos_token_ids == (256,)
    assert params.bad_words_token_ids == (tuple(b"xy"), tuple(b" xy"))


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        pytest.param("", {}, RequestRefused, "empty", id="empty"),
        pytest.param([], {}, RequestRefused, "empty", id="no_tokens"),
        pytest.param("x" * 128, {}, RequestRefused, "max_model_len", id="too_long"),
        pytest.param([5, 999], {}, RequestRefused, "999", id="outside_the_vocabulary"),
        pytest.param([5, -1], {}, RequestRefused, "-1", id="negative_token"),
        pytest.param([1.5], {}, RequestRefused, "token ids", id="not_a_token"),
        pytest.param(7, {}, RequestRefused, "token ids", id="not_a_prompt"),
        pytest.param({"text": "x"}, {}, RequestRefused, "prompt_token_ids", id="dict_without_prompt"),
        pytest.param("x", {"stop": "a", "detokenize": False}, InvalidSamplingParams, "stop", id="stop_without_text"),
        pytest.param("x", {"logit_bias": {999: 1.0}}, InvalidSamplingParams, "999", id="bias_outside"),
    ],
)
def test_refusals_are_raised_by_add(serve: Serve, prompt: Any, params: Any, error: Any, words: str) -> None:
    loop = serve().loop
    with pytest.raises(error, match=words):
        loop.add(prompt, SamplingParams(**params))
    assert loop.num_live_requests == 0
    assert loop.add("ab", SamplingParams(max_tokens=2)).result().text == "ab"


def test_a_refused_request_of_several_leaves_none_behind(serve: Serve) -> None:
    bench = serve(num_kv_blocks=5)
    with pytest.raises(RequestRefused, match="KV blocks"):
        bench.loop.add("abc", SamplingParams(n=2, max_tokens=100))
    assert bench.loop.num_live_requests == 0
    bench.settle()


def test_L1_a_live_id_is_refused_and_free_again_at_once_after_an_abort(serve: Serve) -> None:
    bench = serve()
    bench.hold_step()
    first = bench.loop.add("abc", SamplingParams(max_tokens=50), request_id="x")
    bench.wait_inside()
    with pytest.raises(RequestRefused, match="in use"):
        bench.loop.add("abc", request_id="x")
    assert bench.loop.abort("x")
    second = bench.loop.add("xyz", SamplingParams(max_tokens=4), request_id="x")
    bench.release()
    assert first.result().outputs[0].finish_reason == "abort"
    assert second.result().text == "xyzx"


def test_an_id_is_free_again_when_its_end_is_seen(serve: Serve) -> None:
    loop = serve().loop
    for _ in range(50):
        *_, last = loop.add("ab", SamplingParams(max_tokens=2), request_id="again")
        assert last.finished


def test_ids_of_completions_are_taken_too(serve: Serve) -> None:
    bench = serve()
    bench.hold_step()
    handle = bench.loop.add("ab", SamplingParams(n=2), request_id="x")
    with pytest.raises(RequestRefused, match="x#1"):
        bench.loop.add("ab", request_id="x#1")
    bench.release()
    handle.result()


def test_the_id_of_a_finished_completion_may_be_used_beside_its_siblings(serve: Serve) -> None:
    bench = serve()
    bench.runner.step_seconds = 0.005
    bench.runner.ends_after["x#0"] = 1
    siblings = bench.loop.add("ab", SamplingParams(n=2, max_tokens=100), request_id="x")
    while not any(output.finished for output in next(siblings).outputs):
        pass
    bench.hold_step()
    bench.runner.ends_after.clear()
    other = bench.loop.add("cd", SamplingParams(max_tokens=4), request_id="x#0")
    assert bench.loop.abort("x")
    bench.release()
    assert siblings.result().outputs[1].finish_reason == "abort"
    assert other.result(timeout=10).text == "cdcd"


def test_before_start_and_after_stop_add_refuses(serve: Serve) -> None:
    bench = serve(start=False)
    with pytest.raises(ServingLoopDown, match="start"):
        bench.loop.add("a")
    with bench.loop as loop:
        assert loop.add("a", SamplingParams(max_tokens=1)).result().text == "a"
    assert not loop.healthy
    with pytest.raises(ServingLoopDown, match="stopped"):
        loop.add("a")
    with pytest.raises(ServingLoopDown, match="stopped"):
        loop.start()


def test_a_loop_that_never_started_can_be_stopped(serve: Serve) -> None:
    loop = serve(start=False).loop
    loop.stop()
    assert loop.state is LoopState.STOPPED


def test_a_slow_consumer_gets_bigger_deltas(serve: Serve) -> None:
    handle = serve().loop.add("abc", SamplingParams(max_tokens=30))
    handle.result()
    deltas = list(handle)
    assert [delta.text for delta in deltas] == ["abc" * 10]
    assert deltas[0].finished


def test_result_can_run_out_of_time_and_be_asked_again(serve: Serve) -> None:
    bench = serve()
    bench.hold_step()
    handle = bench.loop.add("ab", SamplingParams(max_tokens=2))
    with pytest.raises(TimeoutError, match="did not finish"):
        handle.result(timeout=0.01)
    bench.release()
    assert handle.result(timeout=10).text == "ab"


def test_async_iteration(serve: Serve) -> None:
    loop = serve(step_seconds=0.001).loop

    async def read(prompt: str) -> str:
        texts = [delta.text async for delta in loop.add(prompt, SamplingParams(max_tokens=20))]
        return "".join(texts)

    async def read_all() -> list[str]:
        return await asyncio.gather(*(read(f"{index}!") for index in range(12)))

    assert asyncio.run(read_all()) == [
        f"{index}!" * 10 if index < 10 else (f"{index}!" * 7)[:20] for index in range(12)
    ]


def test_a_cancelled_async_consumer_closes_its_request(serve: Serve) -> None:
    bench = serve(step_seconds=0.001)

    async def read_some() -> None:
        with bench.loop.add("ab", SamplingParams(max_tokens=100)) as handle:
            async for _delta in handle:
                pass

    async def cancel() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read_some(), 0.02)

    asyncio.run(cancel())
    assert bench.loop.num_live_requests == 0
    bench.settle()


def test_leaving_a_handle_aborts_it(serve: Serve) -> None:
    bench = serve(step_seconds=0.001)
    with bench.loop.add("ab", SamplingParams(max_tokens=100)) as handle:
        next(handle)
    assert handle.result().outputs[0].finish_reason == "abort"
    bench.settle()


def test_a_stale_close_does_not_end_a_newer_request_of_that_id(serve: Serve) -> None:
    bench = serve()
    old = bench.loop.add("ab", SamplingParams(max_tokens=1), request_id="x")
    old.result()
    bench.hold_step()
    new = bench.loop.add("ab", SamplingParams(max_tokens=3), request_id="x")
    old.close()
    bench.release()
    assert new.result().text == "aba"
