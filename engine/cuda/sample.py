"""Sampling on a GPU: one pass over the logits for steps that are greedy or tempered, the general stage for others."""

from __future__ import annotations

import numpy as np
import torch

from ...stages.io import GrammarOutput
from ...stages.records import Batch, ExecuteModelState, IntArray, PreparedInputs, SamplerOutput
from ...stages.sample import Sample, score
from ...stages.sampling.columns import Feature, SamplingColumns
from ...stages.sampling.step import SamplingStep, TokenHistory
from ..kernels.sampling import DrawParams, choose_tokens

FUSED = Feature.RANDOM | Feature.LOGPROBS
"""What requests may use for the one pass to serve them."""


class CudaSample:
    """The sample stage; tokens are those of :class:`~twostroke.stages.sample.Sample`, which takes all other steps."""

    def __init__(self, columns: SamplingColumns, table: TokenHistory, device: torch.device) -> None:
        self._general = Sample(columns, table)
        self._columns = columns
        self._table = table
        self._device = device
        self._known: tuple[bytes, torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState, grammar: GrammarOutput | None
    ) -> SamplerOutput:
        """Sample.

        Raises:
            InvalidGrammarOutput: grammar masks that fit neither batch nor vocabulary.
        """
        sampling = inputs.sampling_reqs
        if grammar is not None or inputs.prompt_spans or not len(sampling):
            return self._general(batch, inputs, state, grammar)
        is_all = len(sampling) == len(batch.rows)
        step = SamplingStep.gather(self._columns, self._table, batch.rows if is_all else batch.rows[sampling])
        if step.active & ~int(FUSED):
            return self._general(batch, inputs, state, grammar)
        temperatures, seeds = self._params_of(step)
        positions = inputs.seq_lens if is_all else inputs.seq_lens[_to_device(sampling, self._device)]
        rows = None if is_all else _to_device(inputs.sampling_logits, self._device)
        tokens, health = choose_tokens(state.logits, DrawParams(temperatures, seeds, positions), rows)
        logprobs, logprobs_reqs, num_logprobs = None, None, None
        if step.uses(Feature.LOGPROBS):
            raw = state.logits[: len(sampling)] if rows is None else state.logits[rows]
            logprobs, logprobs_reqs, num_logprobs = score(raw, tokens, step)
        return SamplerOutput(
            tokens, health=health, logprobs=logprobs, logprobs_reqs=logprobs_reqs, num_logprobs=num_logprobs
        )

    def _params_of(self, step: SamplingStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Temperatures and seeds on the device, kept while the step's requests draw alike."""
        params = step.params
        key = params.tobytes()
        if self._known is None or self._known[0] != key:
            is_random = (params["flags"] & int(Feature.RANDOM)) > 0
            temperatures = np.where(is_random, params["temperature"], np.float32(0))
            seeds = np.ascontiguousarray(params["seed"]).view(np.int32).reshape(-1, 2).T  # little-endian: low, high
            self._known = key, _to_device(temperatures, self._device), _to_device(seeds, self._device)
        return self._known[1:]


def _to_device(array: IntArray | np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(device, non_blocking=True)
