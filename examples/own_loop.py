"""A scheduler of one's own in forty lines, and the loop around it: python examples/own_loop.py

First come, first served. A request gets all the blocks that it can ever need when it starts, with its whole prompt, as
soon as there is room for it; whoever runs decodes one token a step.
"""

from collections import deque

from twostroke.engine import EngineConfig, SamplingParams, build_runner
from twostroke.engine.models import random_model, tiny_config
from twostroke.stages.io import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_TOKENS = 17, 4, 3, 8
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


class FirstComeFirstServed:
    def __init__(self, prompts: dict[str, list[int]]) -> None:
        self.waiting, self.running, self.finished = deque(prompts.items()), dict[str, NewRequestData](), set[str]()
        self.outputs: dict[str, list[int]] = {req_id: [] for req_id in prompts}
        self.free = list(range(1, NUM_BLOCKS))  # block 0 is the null block

    def schedule(self) -> SchedulerOutput:
        old, new, finished = list(self.running.values()), list[NewRequestData](), self.finished
        while self.waiting and len(self.running) < MAX_NUM_SEQS:
            req_id, prompt = self.waiting[0]
            count = -(-(len(prompt) + MAX_TOKENS) // BLOCK_SIZE)
            if count > len(self.free):
                break
            blocks = [[self.free.pop() for _ in range(count)]]
            new.append(NewRequestData(req_id=req_id, prompt_token_ids=prompt, block_ids=blocks, sampling_params=PARAMS))
            self.running[self.waiting.popleft()[0]] = new[-1]
        # Of a running request, everything is in the cache but the token that was sampled last.
        computed = [len(data.prompt_token_ids) + len(self.outputs[data.req_id]) - 1 for data in old]
        known = CachedRequestData(req_ids=[data.req_id for data in old], num_computed_tokens=computed)
        counts = dict.fromkeys(known.req_ids, 1) | {data.req_id: len(data.prompt_token_ids) for data in new}
        self.finished = set()
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=known,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            finished_req_ids=finished,
        )

    def update(self, output: ModelRunnerOutput) -> None:
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.outputs[req_id] += tokens
            if len(self.outputs[req_id]) == MAX_TOKENS:
                self.free += self.running.pop(req_id).block_ids[0]
                self.finished.add(req_id)


scheduler = FirstComeFirstServed({f"r{count}": [1] * count for count in (9, 3, 1, 12)})
limits = EngineConfig(device="cpu", num_kv_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS)
runner = build_runner(limits, model=random_model(tiny_config()))
while runner.execute_model(scheduler.schedule()) is None:
    scheduler.update(runner.sample_tokens().get_output())
print(scheduler.outputs)
