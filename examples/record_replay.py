"""Record a run, replay it, and find the first step where another sampler differs: python examples/record_replay.py

The same from a shell: `twostroke generate --record run.jsonl`, then `twostroke replay` and `twostroke timeline`.
"""

import tempfile
from pathlib import Path

from twostroke.engine import LLM, SamplingParams
from twostroke.engine.recording_reader import read_recording
from twostroke.engine.replay import replay, runner_for
from twostroke.engine.timeline import timeline_of
from twostroke.engine.timeline_html import timeline_page
from twostroke.stages.records import ExecuteModelState, PreparedInputs, SamplerOutput


def second_best(state: ExecuteModelState, inputs: PreparedInputs) -> SamplerOutput:
    """Takes the second likeliest token, to have a difference to find."""
    return SamplerOutput(state.logits[inputs.sampling_logits].topk(2, dim=1).indices[:, 1])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with LLM("smollm2", device="cpu") as llm, llm.runner.record(path):
            llm.generate(["The capital of France is", "Water boils at"], SamplingParams(max_tokens=6, seed=3))
        recording = read_recording(path)
        print(f"{len(recording.steps)} steps in {path.stat().st_size} bytes")

        runner = runner_for(recording)
        report = replay(recording, runner)
        print("as it was:", "no difference" if report.is_same else report.comparison.first)
        runner.shutdown()

        runner = runner_for(recording)
        runner.stages.replace("sample", second_best)
        print("second best:", replay(recording, runner).comparison.first)
        runner.shutdown()

        page = timeline_page(timeline_of(recording), path.name)
        print(f"a page of {len(page) // 1024} KiB to look at it")


if __name__ == "__main__":
    main()
