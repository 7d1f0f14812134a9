"""Running a recording again: on any device, with other stages, from any step; and saying where it differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, fields, frozen

from ..fsm import InputRefused, StageFailed, StepState, TwoStrokeError
from ..stages.forward_context import Model
from ..stages.io import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from ..stages.sampling_params import SamplingParams
from .config import EngineConfig
from .model_runner import ModelRunner, build_runner
from .recording_book import RequestBook
from .recording_format import output_fields
from .recording_reader import RecordedOutput, RecordedStep, Recording
from .replay_compare import Comparison, Difference, Tolerance
from .replay_probe import ScoreProbe

_SCRATCH = "replay: rebuilding "


class ReplayError(TwoStrokeError, ValueError):
    """A recording that this runner cannot replay; the message says why, and what would."""


@frozen(kw_only=True, eq=False)
class ReplayReport:
    """How a replay went.

    ``recorded_failure`` and ``failure`` are what the last step failed with, then and now; empty where it did not.
    """

    num_steps: int
    comparison: Comparison
    recorded_failure: str = ""
    failure: str = ""
    notes: Sequence[str] = ()

    @property
    def is_same(self) -> bool:
        """Whether nothing differs but near ties, and what failed then failed now."""
        return self.comparison.first is None and self.is_same_failure

    @property
    def is_same_failure(self) -> bool:
        """Whether the last step failed as it did, or failed neither time."""
        return self.recorded_failure == self.failure


def runner_for(recording: Recording, *, model: Model | str | None = None, **overrides: Any) -> ModelRunner:
    """A runner with the recorded configuration; ``overrides`` are fields of :class:`EngineConfig`.

    ``model`` is an object, or a name in the place of the recorded one.

    Raises:
        ReplayError: the recorded model was an object, and ``model`` is None; or the model has another shape.
    """
    known = {own.name for own in fields(EngineConfig)}
    values = {name: value for name, value in recording.config.items() if name in known}
    described = recording.header.get("model")
    if isinstance(model, str):
        values["model"], model = model, None
    elif model is None and isinstance(described, Mapping):
        if described["source"] == "object":
            raise ReplayError("the recorded model was an object of the program: name one with --model, or pass it")
        values["model"] = described["source"]
    if recording.state:  # what was computed before the recording is computed by a request of its own
        values["max_num_seqs"] += 1
    runner = build_runner(EngineConfig(**{**values, "async_scheduling": False, **overrides}), model=model)
    if isinstance(described, Mapping):
        spec = runner.spec
        shape = {
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "num_layers": len(spec.attention_layers),
        }
        if different := [
            f"{name} {described[name]}, not {own}" for name, own in shape.items() if described[name] != own
        ]:
            runner.shutdown()
            raise ReplayError(f"the recorded model has {'; '.join(different)}: replay with the model of the recording")
    return runner


def replay(
    recording: Recording, runner: ModelRunner, *, first_step: int = 1, tolerance: Tolerance | None = None
) -> ReplayReport:
    """Run a recording's steps on a runner that is fresh, and compare what they give.

    Where a token differs, the recorded one is put in its place before the next step, so that every difference is one of
    its own and not the echo of an earlier one. Steps before ``first_step`` are run and not compared. Steps that were
    undone are left out, but for the last.

    Raises:
        ReplayError: the recording lacks something that its steps need.
        TwoStrokeError: whatever the runner raises, where the recorded step did not fail.
    """
    return _Replay(recording, runner, Comparison(tolerance or Tolerance())).run(first_step)


class _Replay:
    """One replay under way. The book has the recorded tokens, the runner its own."""

    def __init__(self, recording: Recording, runner: ModelRunner, comparison: Comparison) -> None:
        self._recording = recording
        self._runner = runner
        self._comparison = comparison
        self._book = RequestBook(recording.state)
        self._corrected: set[str] = set()
        self._probe = ScoreProbe(runner)
        self._notes: list[str] = [recording.torn] if recording.torn else []
        if recording.is_redacted:
            self._notes.append("tokens are redacted: only how many each step sampled is compared")
        if recording.state:
            self._notes.append(
                "keys and values of before the recording were computed anew, and may be rounded otherwise"
            )

    def run(self, first_step: int) -> ReplayReport:
        steps = self._recording.steps
        last = steps[-1] if steps else None
        recorded_failure = _failure_of(last) if last is not None else ""
        failure = ""
        self._runner.observers.add(self._probe)
        try:
            for step in steps:
                if step is last and recorded_failure:
                    failure = self._run_failing(step)
                elif not step.was_undone:
                    self._run(step, is_compared=step.number >= first_step)
        finally:
            self._runner.observers.remove(self._probe)
        return ReplayReport(
            num_steps=len(steps),
            comparison=self._comparison,
            recorded_failure=recorded_failure,
            failure=failure,
            notes=self._notes,
        )

    def _run(self, step: RecordedStep, *, is_compared: bool) -> None:
        output = self._execute(step)
        self._book.schedule(step.scheduled)
        if step.output is None:
            return
        if is_compared:
            got = RecordedOutput.of(output_fields(output))
            ends = step.ends
            self._corrected |= self._comparison.outputs(step.number, ends, step.output, got, self._probe.lead)
            self._compare_logits(step)
        elif not step.output.is_redacted:
            for index, req_id in enumerate(output.req_ids):
                if list(output.sampled_token_ids[index]) != list(step.output.tokens.get(req_id, ())):
                    self._corrected.add(req_id)
        self._book.sampled(step.ends, step.output.tokens)

    def _run_failing(self, step: RecordedStep) -> str:
        """Run a step that failed when it was recorded; what it fails with now, or nothing."""
        try:
            self._execute(step)
        except (StageFailed, InputRefused) as error:
            if self._runner.state is StepState.FORWARDED:
                self._runner.rollback()
            cause = error.__cause__ if isinstance(error, StageFailed) and error.__cause__ is not None else error
            return _describe(error.stage if isinstance(error, StageFailed) else "", type(cause).__name__, str(cause))
        return ""

    def _execute(self, step: RecordedStep) -> ModelRunnerOutput:
        if step.left_out:
            raise ReplayError(f"step {step.number} came with {', '.join(step.left_out)}, which no recording holds")
        if self._recording.state:
            self._rebuild(step)
        runner = self._runner
        output = runner.execute_model(self._adapted(step.scheduled))
        return runner.sample_tokens(step.grammar).get_output() if output is None else output

    # ---- what the runner must be told beyond the recorded step

    def _adapted(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """The step, with recorded tokens for requests that drew others, and unknown requests sent as new."""
        known = self._runner.parts.table.records
        cached = scheduled.scheduled_cached_reqs
        unknown = [index for index, req_id in enumerate(cached.req_ids) if req_id not in known]
        if unknown:
            late = [self._as_new(cached, index) for index in unknown]
            kept = [req_id for index, req_id in enumerate(cached.req_ids) if index not in unknown]
            cached = cached.restricted_to(kept)
            scheduled = evolve(scheduled, scheduled_new_reqs=[*scheduled.scheduled_new_reqs, *late])
        wrong = self._corrected.intersection(cached.req_ids)
        if wrong:
            self._corrected -= wrong
            cached = self._with_recorded_tokens(cached, wrong)
        if self._recording.header.get("source") == "vllm":
            scheduled = evolve(
                scheduled, scheduled_new_reqs=[self._with_eos(data) for data in scheduled.scheduled_new_reqs]
            )
        return evolve(scheduled, scheduled_cached_reqs=cached)

    def _with_recorded_tokens(self, cached: CachedRequestData, wrong: set[str]) -> CachedRequestData:
        told = list(cached.new_token_ids) or [()] * len(cached.req_ids)
        all_tokens = dict(cached.all_token_ids)
        for index, req_id in enumerate(cached.req_ids):
            if req_id in wrong:
                tokens, start = self._book.requests[req_id].token_ids, cached.num_computed_tokens[index]
                if req_id in cached.resumed_req_ids:
                    all_tokens.setdefault(req_id, tokens)
                elif not told[index]:
                    told[index] = tokens[start:]
        return evolve(cached, new_token_ids=told, all_token_ids=all_tokens)

    def _as_new(self, cached: CachedRequestData, index: int) -> NewRequestData:
        """A request that was live when the recording began, at its first step in it."""
        req_id = cached.req_ids[index]
        request = self._book.requests.get(req_id)
        if request is None:
            raise ReplayError(f"request {req_id!r} began before the recording, which says nothing of it")
        added = cached.new_block_ids[index] if cached.new_block_ids else None
        held = [[]] * len(added) if req_id in cached.resumed_req_ids and added is not None else request.block_ids
        return NewRequestData(
            req_id=req_id,
            prompt_token_ids=request.prompt_token_ids,
            prefill_token_ids=cached.all_token_ids.get(req_id) or request.token_ids,
            block_ids=[[*own, *more] for own, more in zip(held, added or [()] * len(held), strict=True)],
            num_computed_tokens=cached.num_computed_tokens[index],
            sampling_params=request.sampling_params,
        )

    def _rebuild(self, step: RecordedStep) -> None:
        """Compute the keys and values that a request of this step was given and that this runner never computed."""
        known, scheduled = self._runner.parts.table.records, step.scheduled
        cached = scheduled.scheduled_cached_reqs
        indices = (index for index, req_id in enumerate(cached.req_ids) if req_id not in known)
        for data in (*scheduled.scheduled_new_reqs, *(self._as_new(cached, index) for index in indices)):
            if data.num_computed_tokens:
                self._compute(data)

    def _compute(self, data: NewRequestData) -> None:
        """Fill the computed part of a request's blocks, by a request that lives for that only and samples nothing."""
        tokens = data.prompt_token_ids if data.prefill_token_ids is None else data.prefill_token_ids
        req_id, end, done = _SCRATCH + data.req_id, data.num_computed_tokens, 0
        params = SamplingParams(temperature=0.0)
        while done < end:
            count = min(end - done, self._runner.config.max_num_batched_tokens)
            part = SchedulerOutput(num_scheduled_tokens={req_id: count}, total_num_scheduled_tokens=count)
            if not done:
                new = NewRequestData(
                    req_id=req_id,
                    prompt_token_ids=tokens[: end + 1],
                    block_ids=data.block_ids,
                    sampling_params=params,
                )
                part = evolve(part, scheduled_new_reqs=[new])
            else:
                going_on = CachedRequestData(req_ids=[req_id], num_computed_tokens=[done])
                part = evolve(part, scheduled_cached_reqs=going_on)
            self._runner.execute_model(part)
            self._runner.sample_tokens()
            done += count
        self._runner.execute_model(SchedulerOutput(finished_req_ids={req_id}))

    def _with_eos(self, data: NewRequestData) -> NewRequestData:
        loaded = self._runner.loaded
        eos = loaded.eos_token_ids if loaded is not None else ()
        return evolve(data, sampling_params=evolve(data.sampling_params, eos_token_ids=eos))

    def _compare_logits(self, step: RecordedStep) -> None:
        if step.tensors is None:
            return
        from safetensors.torch import load_file

        recorded = load_file(step.tensors).get("logits")
        if recorded is None:
            return
        req_id, position, distance = self._probe.farthest_logits(recorded)
        if distance > self._comparison.tolerance.logprobs:
            self._comparison.add(
                Difference(
                    step=step.number,
                    req_id=req_id,
                    position=position,
                    what="logits",
                    recorded="the recorded ones",
                    got=f"up to {distance:.2g} away",
                )
            )


def _failure_of(step: RecordedStep) -> str:
    """What a step failed with for good; empty where it was sampled in the end."""
    line = step.failure
    if line is None or step.output is not None:
        return ""
    return _describe(line["stage"], line["type"], line["error"])


def _describe(stage: str, kind: str, message: str) -> str:
    return f"{f'stage {stage!r}: ' if stage else ''}{kind}: {message}"
