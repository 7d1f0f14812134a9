"""The loop by hand, with two steps in flight: python examples/async_loop.py

A step is launched before the tokens of the one before it have arrived: the scheduler counts them, the runner has them.
While the device computes the newer step, the host takes in the older one.
"""

from collections import deque

from twostroke.engine import EngineConfig, SamplingParams, build_runner
from twostroke.engine.serving_loop import scheduler_for
from twostroke.stages.io import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput

DEPTH = 2
PROMPTS = ("The capital of France is", "Water boils at", "One, two, three,")
PARAMS = SamplingParams(temperature=0, max_tokens=12)


def main() -> None:
    """Serve three prompts, each under its own text as the request's id."""
    runner = build_runner(EngineConfig(model="smollm2", device="cpu"))
    assert runner.loaded is not None
    tokenizer = runner.loaded.require_tokenizer()
    scheduler = scheduler_for(runner)  # or one of your own: it makes SchedulerOutputs
    for prompt in PROMPTS:
        scheduler.add_request(prompt, tokenizer.encode(prompt), PARAMS)
    tokens: dict[str, list[int]] = {prompt: [] for prompt in PROMPTS}
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput | AsyncModelRunnerOutput]] = deque()

    while scheduler.has_work():
        scheduled = scheduler.schedule()
        if runner.execute_model(scheduled) is None:  # there were tokens to compute, so now they are drawn
            in_flight.append((scheduled, runner.sample_tokens()))
        if in_flight and (len(in_flight) == DEPTH or not scheduled.num_scheduled_tokens):
            oldest, output = in_flight.popleft()
            for update in scheduler.update_from_output(oldest, output.get_output()):
                tokens[update.req_id] += update.new_token_ids

    for prompt in PROMPTS:
        print(f"{prompt}{tokenizer.decode(tokens[prompt])}")
    runner.shutdown()


if __name__ == "__main__":
    main()
