"""Many threads at once, and nothing left of them afterwards."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from twostroke.stages.sampling_params import SamplingParams

Serve = Callable[..., Any]


def remaining(bench: Any) -> int:
    """Entries of every map that holds requests."""
    live = bench.loop._live
    return len(live) + len(live._completions) + len(bench.runner.tokens) + bench.loop.scheduler.num_running


def test_threads_add_stream_abort_and_drop(serve: Serve) -> None:
    bench = serve(num_kv_blocks=40)

    def user(seed: int) -> int:
        draw = random.Random(seed)
        for turn in range(15):
            prompt = "".join(draw.choices("abc", k=draw.randint(1, 12)))
            params = SamplingParams(
                max_tokens=draw.randint(1, 20), n=draw.choice([1, 1, 2]), stop=draw.choice(["", "ccc"]) or ()
            )
            handle = bench.loop.add(prompt, params, request_id=f"user{seed}")
            end = draw.choice(["read", "result", "abort", "close", "drop"])
            if end == "read":
                texts = ["", ""]
                for delta in handle:
                    for output in delta.outputs:
                        texts[output.index] += output.text
                assert all((prompt * 20).startswith(text) for text in texts)
            elif end == "abort":
                next(handle)
                bench.loop.abort(handle.request_id)
            elif end == "close":
                handle.close()
            whole = handle.result(timeout=30) if end != "drop" or turn == 14 else None
            assert whole is None or whole.finished
            if end == "drop":
                handle.close()
        return seed

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(user, range(8))) == list(range(8))
    bench.settle()
    assert remaining(bench) == 0
    assert bench.loop.healthy


def test_many_more_requests_than_room(serve: Serve) -> None:
    bench = serve(num_kv_blocks=20, max_num_seqs=4)
    handles = [bench.loop.add(f"{index:02d}", SamplingParams(max_tokens=30)) for index in range(40)]
    assert [handle.result(timeout=30).text for handle in handles] == [f"{index:02d}" * 15 for index in range(40)]


def test_L9_nothing_is_kept_of_finished_or_unknown_ids(serve: Serve) -> None:
    bench = serve()
    for index in range(1000):
        assert not bench.loop.abort(f"never-{index}")
    handles = [bench.loop.add("a", SamplingParams(max_tokens=1), request_id=f"r{index}") for index in range(100)]
    for handle in handles:
        handle.result(timeout=10)
    for index in range(1000):
        assert not bench.loop.abort(f"r{index}")
    bench.settle()
    assert remaining(bench) == 0
    assert not bench.loop.scheduler._finished_req_ids


def test_a_consumer_that_never_reads_does_not_hold_the_others_up(serve: Serve) -> None:
    bench = serve()
    unread = bench.loop.add("ab", SamplingParams(max_tokens=100))
    assert bench.loop.add("cd", SamplingParams(max_tokens=100)).result(timeout=10).text == "cd" * 50
    assert "".join(delta.text for delta in unread) == "ab" * 50


def test_one_stream_read_by_several_threads_gives_everything_once(serve: Serve) -> None:
    handle = serve(step_seconds=0.0005).loop.add("ab", SamplingParams(max_tokens=60))
    tokens: list[int] = []
    lock = threading.Lock()

    def read() -> None:
        for delta in handle:
            with lock:
                tokens.extend(delta.outputs[0].token_ids)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(tokens) == sorted(b"ab" * 30)
