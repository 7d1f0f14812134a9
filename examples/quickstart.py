"""Text for two prompts, with a stage of one's own in between: python examples/quickstart.py"""

from twostroke.engine import LLM, SamplingParams
from twostroke.stages.records import Batch


def probe(batch: Batch) -> None:  # a stage: its annotations are its wiring
    print("step of", dict(zip(batch.req_ids, batch.num_scheduled_tokens.tolist(), strict=True)))


with LLM("smollm2", device="cpu") as llm:
    llm.runner.stages.insert(probe, after="update_states")
    for result in llm.generate(["The capital of France is", "Water boils at"], SamplingParams(max_tokens=12, seed=1)):
        print(f"{result.prompt}{result.text}")
