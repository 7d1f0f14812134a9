"""commit: sampled tokens become known, outputs are assembled, and a rollback takes both back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from twostroke.fsm import Transaction
from twostroke.stages.commit import Commit
from twostroke.stages.device import HostDevice
from twostroke.stages.errors import RequestFailed
from twostroke.stages.input_buffers import InputBuffers
from twostroke.stages.io import ModelRunnerOutput
from twostroke.stages.prepare_inputs import PrepareInputs
from twostroke.stages.records import Batch, LogprobsTensors, PreparedInputs, SamplerOutput


def fail(error: BaseException) -> None:
    """Nothing may go wrong late here."""
    raise AssertionError("an output could not be collected") from error


def opened(kit: Any, step: Any) -> tuple[Batch, PreparedInputs, Transaction]:
    buffers = InputBuffers(max_tokens=32, max_reqs=4, block_tables=kit.table.block_tables, device=HostDevice())
    transaction = Transaction(1)
    batch = kit.update_states(step, transaction)
    return batch, PrepareInputs(kit.table, buffers)(batch), transaction


def commit(kit: Any, opened: tuple[Batch, PreparedInputs, Transaction], output: SamplerOutput) -> ModelRunnerOutput:
    batch, inputs, transaction = opened
    late = Commit(kit.table, kit.limits.vocab_size, on_error=fail)(output, batch, inputs, transaction)
    assert late.ready()
    result = late.get_output()
    assert late.get_output() is result
    kit.table.apply_late_tokens()
    return result


def test_only_requests_that_sampled_get_a_token(kit: Any, build: Any) -> None:
    news = [build.new("chunk", [1, 2, 3, 4]), build.new("whole", [5, 6], [7])]
    step = opened(kit, build.output({"chunk": 2, "whole": 2}, news))
    output = commit(kit, step, SamplerOutput(torch.tensor([42])))
    assert output.req_ids == ["chunk", "whole"]
    assert output.req_id_to_index == {"chunk": 0, "whole": 1}
    assert output.sampled_token_ids == [[], [42]]
    assert kit.tokens("chunk") == [1, 2, 3, 4]
    assert kit.tokens("whole") == [5, 6, 42]


def test_S14_an_id_outside_the_vocabulary_fails_its_request_only(kit: Any, build: Any) -> None:
    news = [build.new(req_id, [1, 2], [block]) for req_id, block in zip("abc", (3, 4, 5), strict=True)]
    step = opened(kit, build.output(dict.fromkeys("abc", 2), news))
    output = commit(kit, step, SamplerOutput(torch.tensor([50, 49, -1])))
    assert output.sampled_token_ids == [[], [49], []]
    assert set(output.request_errors) == {"a", "c"}
    assert "sampled token 50 is outside the vocabulary of 50" in str(output.request_errors["a"])
    assert kit.tokens("a") == [1, 2, 49]  # an id that can be looked up: steps scheduled ahead count on it


def test_failed_requests_are_named_and_their_neighbours_are_not_shifted(kit: Any, build: Any) -> None:
    news = [build.new(req_id, [1], [block]) for req_id, block in zip("abc", (3, 4, 5), strict=True)]
    step = opened(kit, build.output(dict.fromkeys("abc", 1), news))
    rows = LogprobsTensors(torch.tensor([[8], [9]]), torch.tensor([[-1.0], [-2.0]]), torch.tensor([1, 2]))
    sampled = SamplerOutput(
        torch.tensor([7, 8, 9]),
        health=torch.tensor([0, 50, 0]),
        logprobs=rows,
        logprobs_reqs=np.array([1, 2]),
        num_logprobs=np.array([0, 0]),
    )
    output = commit(kit, step, sampled)
    assert output.sampled_token_ids == [[7], [], [9]]
    assert set(output.request_errors) == {"b"}
    assert isinstance(output.request_errors["b"], RequestFailed)
    assert len(kit.tokens("b")) == 2  # steps scheduled ahead count on it; only the scheduler ends the request
    assert output.num_nans_in_logits == {"b": 50}
    assert output.logprobs is not None
    assert [len(output.logprobs.for_request(i).logprobs) for i in range(3)] == [0, 0, 1]
    assert output.logprobs.for_request(2).logprob_token_ids.tolist() == [[9]]


def test_rollback_takes_the_tokens_back(kit: Any, build: Any) -> None:
    kit.step(build.output({"a": 2}, [build.new("a", [1, 2])]), {"a": 3})
    before = kit.snapshot()
    step = opened(kit, build.output({"a": 1}, cached=build.cached("a", [2])))
    mark = step[2].savepoint()
    commit(kit, step, SamplerOutput(torch.tensor([4])))
    assert kit.tokens("a") == [1, 2, 3, 4]
    step[2].rollback_to(mark)
    assert kit.tokens("a") == [1, 2, 3]
    commit(kit, step, SamplerOutput(torch.tensor([5])))
    assert kit.tokens("a") == [1, 2, 3, 5]
    step[2].rollback()
    assert kit.snapshot() == before


def test_the_last_place_takes_a_token(kit: Any, build: Any) -> None:
    step = opened(kit, build.output({"a": 16}, [build.new("a", [1] * 16, [1, 2, 3, 4])]))
    assert commit(kit, step, SamplerOutput(torch.tensor([5]))).sampled_token_ids == [[5]]
    assert kit.tokens("a") == [1] * 16 + [5]
