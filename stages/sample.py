"""The sample stage: one token for each request whose last known token was computed."""

from __future__ import annotations

import numpy as np
import torch

from .io import GrammarOutput
from .records import (
    NOTHING_LEFT,
    Batch,
    ExecuteModelState,
    IntArray,
    LogprobsTensors,
    PreparedInputs,
    PromptSpan,
    SamplerOutput,
)
from .sampling.choose import choose_tokens
from .sampling.columns import Feature, SamplingColumns
from .sampling.edits import edit_logits
from .sampling.grammar import match_grammar
from .sampling.logprobs import gather_logprobs
from .sampling.step import RowParameters, SamplingStep, TokenHistory, to_device

_LOGPROBS = int(Feature.LOGPROBS)


class Sample:
    """Chooses tokens from logits, which it never writes: a step that failed here can be sampled again.

    Greedy requests take the likeliest token after masks, bias and penalties. The others draw one after temperature,
    min_p, top_k and top_p; what they draw depends on their seed and position only. Log probabilities are raw: those of
    the logits before anything was done to them.
    """

    def __init__(self, columns: SamplingColumns, table: TokenHistory) -> None:
        self._columns = columns
        self._table = table
        self._parameters: RowParameters | None = None

    def __call__(
        self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState, grammar: GrammarOutput | None
    ) -> SamplerOutput:
        """Sample.

        Raises:
            InvalidGrammarOutput: grammar masks that fit neither batch nor vocabulary.
        """
        matched = match_grammar(grammar, batch, inputs, state.logits.shape[1])
        prompt_logprobs = tuple(self._score_prompt(batch, span, state.logits) for span in inputs.prompt_spans)
        num_sampling = len(inputs.sampling_reqs)
        if not num_sampling:
            nothing = torch.empty(0, dtype=torch.int64, device=state.logits.device)
            return SamplerOutput(nothing, prompt_logprobs=prompt_logprobs)
        rows = batch.rows if num_sampling == batch.num_reqs else batch.rows[inputs.sampling_reqs]
        self._parameters = RowParameters.read(self._columns, rows, self._parameters)
        step = SamplingStep.of(self._parameters, self._table)
        raw = _select(state.logits, inputs)
        edited = edit_logits(raw, step, self._columns, self._table, matched)
        tokens, peaks = choose_tokens(edited, step)
        logprobs, logprobs_reqs, num_logprobs = score(raw, tokens, step)
        return SamplerOutput(
            tokens,
            health=_health(raw, raw.amax(dim=1) if edited is not raw else peaks, peaks),
            logprobs=logprobs,
            logprobs_reqs=logprobs_reqs,
            num_logprobs=num_logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _score_prompt(self, batch: Batch, span: PromptSpan, logits: torch.Tensor) -> LogprobsTensors:
        """Log probabilities of the prompt tokens that really follow each position of a span."""
        row = int(batch.rows[span.batch_index])
        following = self._table.token_ids[row, span.position + 1 : span.position + 1 + span.num_positions]
        num_logprobs = max(int(self._columns.rows[row]["num_prompt_logprobs"]), 0)
        scored = logits[span.first_logit : span.first_logit + span.num_positions]
        return gather_logprobs(scored, following.to(torch.int64), num_logprobs)


def _select(logits: torch.Tensor, inputs: PreparedInputs) -> torch.Tensor:
    """The logits rows to sample from; a view when they are the first rows in order, as in every decode step."""
    indices = inputs.sampling_logits
    if inputs.is_sampled_in_order or np.array_equal(indices, np.arange(len(indices))):
        return logits if len(indices) == logits.shape[0] else logits[: len(indices)]
    return logits.index_select(0, to_device(indices, logits.device))


def _health(logits: torch.Tensor, raw_peaks: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor | None:
    """``SamplerOutput.health``; ``raw_peaks`` and ``peaks`` ``[n]`` are the maxima of raw and of edited logits.

    A row's maximum is NaN when any of the row is. Counting them takes a second look at the logits, which on a CPU,
    where nothing has to be waited for, is given only to rows that need it.
    """
    if logits.is_cpu and _is_above_minus_inf(peaks) and (raw_peaks is peaks or _is_above_minus_inf(raw_peaks)):
        return None
    health = torch.isneginf(peaks).to(torch.int64).mul_(NOTHING_LEFT)
    is_nan = raw_peaks.isnan()
    if logits.device.type != "cpu":
        return torch.where(is_nan, logits.isnan().sum(dim=1), health)
    for position in is_nan.nonzero().flatten().tolist():
        health[position] = logits[position].isnan().sum()
    return health


def _is_above_minus_inf(peaks: torch.Tensor) -> bool:
    """Whether none is -inf or NaN; in host memory."""
    return bool(np.minimum.reduce(peaks.numpy()) > -np.inf)


def score(
    logits: torch.Tensor, tokens: torch.Tensor, step: SamplingStep
) -> tuple[LogprobsTensors | None, IntArray | None, IntArray | None]:
    """Log probabilities under raw logits, the positions of the requests that asked, and for how many each."""
    if not step.active & _LOGPROBS:
        return None, None, None
    positions = step.positions_with(Feature.LOGPROBS)
    num_logprobs = step.params["num_logprobs"][positions]
    index = to_device(positions, logits.device)
    return gather_logprobs(logits[index], tokens[index], int(num_logprobs.max())), positions, num_logprobs
