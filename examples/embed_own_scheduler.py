"""A scheduling policy of one's own under the serving loop: python examples/embed_own_scheduler.py

Shortest prompt first: requests wait in a heap, and the reference scheduler gets the next when it has a place for it.
Everything else (blocks, prefix cache, preemption, steps in flight) stays the reference scheduler's business.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence

from twostroke.engine import EngineConfig, SamplingParams, Scheduler, SchedulerConfig, ServingLoop, build_runner
from twostroke.engine.loop_setup import scheduler_for
from twostroke.engine.models import random_model, tiny_config
from twostroke.stages.io import SchedulerOutput


class ShortestFirst(Scheduler):
    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.heap: list[tuple[int, int, str, Sequence[int], SamplingParams]] = []
        self.arrivals = itertools.count()

    def add_request(
        self, req_id: str, prompt_token_ids: Sequence[int], sampling_params: SamplingParams, cache_salt=""
    ) -> None:
        Scheduler(self.config).add_request(req_id, prompt_token_ids, sampling_params)  # refuses what can't be served
        entry = (len(prompt_token_ids), next(self.arrivals), req_id, prompt_token_ids, sampling_params)
        heapq.heappush(self.heap, entry)

    def schedule(self, *, admit_new: bool = True) -> SchedulerOutput:
        while self.heap and admit_new and self.num_running + self.num_waiting < self.config.max_num_seqs:
            _, _, req_id, prompt, params = heapq.heappop(self.heap)
            super().add_request(req_id, prompt, params)
        return super().schedule(admit_new=admit_new)

    def has_work(self) -> bool:
        return bool(self.heap) or super().has_work()

    def finish_requests(self, req_ids: Iterable[str]) -> list[str]:
        ended = set(req_ids)
        held = [entry[2] for entry in self.heap if entry[2] in ended]
        self.heap = [entry for entry in self.heap if entry[2] not in ended]
        heapq.heapify(self.heap)
        return held + super().finish_requests(ended - set(held))


config = EngineConfig(device="cpu", num_kv_blocks=64, max_num_seqs=1)
runner = build_runner(config, model=random_model(tiny_config()))
with ServingLoop(runner, ShortestFirst(scheduler_for(runner).config)) as loop:
    loop.pause()
    handles = [
        loop.add([7] * length, SamplingParams(max_tokens=4), f"{length} tokens") for length in (30, 5, 20, 1, 10)
    ]
    loop.resume()
    results = sorted((handle.result() for handle in handles), key=lambda result: result.metrics.finished_time or 0.0)
    print("done in this order:", ", ".join(result.request_id for result in results))
