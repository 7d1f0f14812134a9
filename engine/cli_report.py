"""The figures at the end of ``twostroke generate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from attrs import frozen

from .outputs import RequestOutput

STAGE_ORDER = (
    "update_states",
    "prepare_inputs",
    "dispatch",
    "ubatch_slice",
    "build_attn",
    "preprocess",
    "forward",
    "sample",
    "commit",
)
OUTSIDE = "outside the stages"
_WORTH_A_ROW = 0.001  # for stages of one's own, or of steps that only say who has finished


@frozen(kw_only=True)
class StageShare:
    """How much time a stage took: ``ms`` a step, and ``share`` (0 to 1) of the whole run."""

    name: str
    ms: float
    share: float


@frozen(kw_only=True)
class Report:
    """What one run did. Times are in seconds, of the wall clock."""

    model: str
    load_seconds: float
    run_seconds: float
    num_steps: int
    results: Sequence[RequestOutput]
    stage_seconds: Mapping[str, float]

    @property
    def num_tokens(self) -> int:
        """Tokens generated, over all prompts."""
        return sum(len(output.token_ids) for result in self.results for output in result.outputs)

    def summary(self) -> list[tuple[str, str]]:
        """Labels and values, in the order to show them."""
        prompt_tokens = sum(len(result.prompt_token_ids) for result in self.results)
        cached = sum(result.num_cached_tokens for result in self.results)
        waits = [wait for result in self.results if (wait := result.metrics.time_to_first_token) is not None]
        first = f"{median(waits) * 1e3:.0f} ms median, {max(waits) * 1e3:.0f} ms longest" if waits else "no token came"
        step_ms = self.run_seconds / max(self.num_steps, 1) * 1e3
        return [
            ("model", f"{self.model}, loaded in {self.load_seconds:.1f} s"),
            ("prompts", f"{len(self.results)} with {prompt_tokens} tokens ({cached} from the prefix cache)"),
            ("tokens generated", f"{self.num_tokens} in {self.run_seconds:.1f} s"),
            ("time to first token", first),
            ("tokens per second", f"{self.num_tokens / self.run_seconds:.1f}"),
            ("steps", f"{self.num_steps}, {step_ms:.1f} ms each"),
        ]

    def stages(self) -> list[StageShare]:
        """The stages in the order they run, and last what lies outside them (scheduler, detokenizing, the loop)."""
        rank = {name: position for position, name in enumerate(STAGE_ORDER)}
        outside = max(self.run_seconds - sum(self.stage_seconds.values()), 0.0)
        rows = sorted(self.stage_seconds.items(), key=lambda row: rank.get(row[0], len(rank)))
        shares = [
            StageShare(name=name, ms=seconds / max(self.num_steps, 1) * 1e3, share=seconds / self.run_seconds)
            for name, seconds in (*rows, (OUTSIDE, outside))
        ]
        return [stage for stage in shares if stage.name in rank or stage.name == OUTSIDE or stage.share > _WORTH_A_ROW]
