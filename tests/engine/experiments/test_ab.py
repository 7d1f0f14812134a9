"""A against B: the same prompts, the same batches, and what is said about the outcome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from twostroke.engine import cli, model_runner
from twostroke.engine.ab import Arm, Comparison, Run, compare_stages, first_difference
from twostroke.engine.cli_ab import report
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner
from twostroke.fsm import WiringError
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs, SamplerOutput
from twostroke.stages.sampling_params import SamplingParams

PROMPTS = [[1, 2, 3], [4, 5], [6]]
PARAMS = [SamplingParams(temperature=1.0, seed=seed, max_tokens=5) for seed in range(3)]


class Fixed:
    """Samples token 5, always, and counts its steps."""

    def __init__(self) -> None:
        self.num_steps = 0

    def __call__(self, inputs: PreparedInputs, state: ExecuteModelState) -> SamplerOutput:
        self.num_steps += 1
        return SamplerOutput(state.logits.new_full((len(inputs.sampling_reqs),), 5).long())


def run(seconds: float, *tokens: tuple[int, ...]) -> Run:
    return Run(seconds, tokens, {"sample": seconds})


def comparison(a: list[Run], b: list[Run]) -> Comparison:
    return Comparison(Arm("A", a), Arm("B", b))


def test_the_same_stages_agree_and_nothing_is_left_behind(make_runner: Callable[..., ModelRunner]) -> None:
    runner = make_runner()
    before = runner.stages.names
    probed: list[int] = []

    def probe(batch: Batch) -> None:
        probed.append(batch.num_reqs)

    result = compare_stages(runner, [("after:update_states", probe)], PROMPTS, PARAMS, repeats=2)
    assert [len(arm.runs) for arm in (result.a, result.b)] == [2, 2]
    assert result.first_differences == (None, None, None)
    assert result.agreement == 1.0
    assert result.a.is_reproducible
    assert result.b.is_reproducible
    assert probed[0] == 3, "a run begins with all prompts waiting"
    assert "probe" in result.stages
    assert result.a.stage_ms("probe") == 0 < result.b.stage_ms("probe")
    assert result.b.stage_ms("forward") > 0
    assert "all tokens are equal" in result.verdict()
    assert runner.stages.names == before
    assert not len(runner.observers)


def test_another_sampler_shows(make_runner: Callable[..., ModelRunner]) -> None:
    runner, fixed = make_runner(), Fixed()
    result = compare_stages(runner, [("sample", fixed)], PROMPTS, PARAMS, repeats=1)
    assert result.b.runs[0].tokens == ((5,) * 5,) * 3
    assert result.agreement < 1
    assert result.a.runs[0].tokens[0] != (5,) * 5
    assert "tokens are equal; 3 of 3 prompts differ, prompt 0 from position" in result.verdict()
    assert "forward, ms a step" in report(result)
    steps = fixed.num_steps
    compare_stages(runner, [], PROMPTS, PARAMS, repeats=1)
    assert fixed.num_steps == steps


def test_graphs_are_captured_again(make_runner: Callable[..., ModelRunner]) -> None:
    runner = make_runner(cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=(4, 8))
    runner.parts.dispatch.counts.clear()
    twin = runner.stages["preprocess"]
    result = compare_stages(runner, [("preprocess", twin)], PROMPTS, PARAMS, repeats=1)
    assert result.agreement == 1.0
    assert not any("edited" in reason or "restored" in reason for _, reason in runner.parts.dispatch.counts)


def test_a_stage_that_does_not_fit_leaves_the_runner_as_it_was(make_runner: Callable[..., ModelRunner]) -> None:
    def misfit(batch: Batch) -> PreparedInputs: ...  # pyright: ignore[reportReturnType]

    runner = make_runner()
    before = runner.stages["sample"]
    with pytest.raises(WiringError, match="sample"):
        compare_stages(runner, [("sample", misfit)], PROMPTS, PARAMS)
    assert runner.stages["sample"] is before


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1,), 1), ((), (1,), 0), ((), (), None)],
)
def test_first_difference(left: tuple[int, ...], right: tuple[int, ...], expected: int | None) -> None:
    assert first_difference(left, right) == expected


def test_figures_are_medians_and_shares() -> None:
    result = comparison(
        [run(1.0, (1, 2, 3, 4), (5,)), run(2.0, (1, 2, 3, 4), (5,)), run(1.25, (1, 2, 3, 4), (5,))],
        [run(0.5, (1, 2, 9, 4), (5, 6)), run(0.5, (1, 2, 9, 4), (5, 7))],
    )
    assert result.a.tokens_per_second == 4.0
    assert result.a.spread == pytest.approx(2.5 / 4)
    assert result.a.stage_ms("sample") == 1.25
    assert result.speedup == 3.0
    assert result.agreement == pytest.approx(4 / 6)
    assert result.first_differences == (2, 1)
    assert result.verdict() == (
        "B is 3.00 times as fast (runs differ by 62%); 66.7% of the tokens are equal; 2 of 2 prompts differ, "
        "prompt 0 from position 2 on; B differs from run to run"
    )


def test_a_difference_within_the_noise_is_none() -> None:
    result = comparison([run(1.0, (1,)), run(1.2, (1,))], [run(1.05, (1,)), run(1.1, (1,))])
    assert result.verdict().startswith("A and B are equally fast within the noise (B/A 1.02, runs differ by 18%)")


def test_the_slower_one_is_named() -> None:
    assert comparison([run(1.0, (1,))], [run(4.0, (1,))]).verdict().startswith("A is 4.00 times as fast")


@pytest.fixture
def tiny_command(
    make_runner: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str]], int]:
    """``twostroke ab`` with a runner over the tiny model, and prompts of token ids: it has no tokenizer."""
    from twostroke.engine import cli_generate

    def build(config: EngineConfig) -> ModelRunner:
        return make_runner(stages=config.stages)

    monkeypatch.setattr(model_runner, "build_runner", build)
    monkeypatch.setattr(cli_generate, "DEMO_PROMPTS", PROMPTS)
    return lambda arguments: cli.main(["ab", *arguments])


def test_the_command(
    tiny_command: Callable[[list[str]], int], plugin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--stage", f"sample={plugin}:Chosen", "--extra", "token=7", "--repeats", "1", "--max-tokens", "4"]
    assert tiny_command(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("tokens/s")
    assert any(line.startswith("sample, ms a step") for line in lines)
    assert lines[-5:-2] == [f"{index:>6}{4:>13}{4:>6}  position 0" for index in range(3)]
    assert lines[-1].startswith("verdict: ")
    assert lines[-1].endswith("3 of 3 prompts differ, prompt 0 from position 0 on")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "sample"], "PLACE=SPEC"),
        (["--stage", "sample=nobody"], "no entry point"),
        (["--stage", "sample=my_stages:wide"], "needs SamplerOutput"),
        (["--stage", "sample=my_stages:Fixed", "--repeats", "0"], "at least 1"),
        (["--stage", "sample=my_stages:Fixed", "--extra", "token"], "NAME=VALUE"),
        (["--stage", "sample=my_stages:Fixed", "--extra", "token=1"], "'token'"),
        (["--stage", "sample=my_stages:Fixed", "--prompts", "no_such_file"], "no_such_file"),
    ],
)
@pytest.mark.usefixtures("plugin")
def test_the_command_refuses(
    tiny_command: Callable[[list[str]], int], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny_command(arguments) != 0
    assert message in capsys.readouterr().err
