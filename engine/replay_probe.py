"""How close a replayed draw was, and how far its logits lie from recorded ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..fsm.observers import StageObserver
from ..stages.records import Batch, ExecuteModelState, PreparedInputs
from ..stages.sampling.random import NoisePurpose, gumbel_noise, noise_keys, seed_words
from .model_runner import ModelRunner


class ScoreProbe(StageObserver):
    """Keeps the records of the last step that say how close a draw was."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._records: dict[type, Any] = {}

    def after_stage(self, name: str, seconds: float, record: object) -> None:
        if isinstance(record, (Batch, PreparedInputs, ExecuteModelState)):
            self._records[type(record)] = record

    def lead(self, req_id: str, position: int, ours: int, theirs: int) -> float | None:
        """By how much the token that was drawn beat another, noise included; masks and penalties are not counted."""
        batch, inputs, state = (self._records[kind] for kind in (Batch, PreparedInputs, ExecuteModelState))
        sampling = [batch.req_ids[int(index)] for index in inputs.sampling_reqs]
        record = self._runner.parts.table.records.get(req_id)
        if req_id not in sampling or record is None or not 0 <= theirs < state.logits.shape[1]:
            return None
        logits = state.logits[int(inputs.sampling_logits[sampling.index(req_id)])].cpu()
        lead = float(logits[ours] - logits[theirs])
        params = record.sampling_params
        if not params.is_greedy:
            words = seed_words(np.array([record.seed], dtype=np.uint64))
            keys = noise_keys(*words, torch.tensor([position], dtype=torch.int32), NoisePurpose.SAMPLE)
            noise = gumbel_noise(keys, torch.tensor([ours, theirs], dtype=torch.int32))[0]
            lead += params.temperature * float(noise[0] - noise[1])
        return lead

    def farthest_logits(self, recorded: torch.Tensor) -> tuple[str, int, float]:
        """The request and position whose logits are farthest from recorded ones (same shape), and how far."""
        batch, inputs, state = (self._records[kind] for kind in (Batch, PreparedInputs, ExecuteModelState))
        if recorded.shape != state.logits.shape:
            return batch.req_ids[0], int(inputs.positions[0]), math.inf
        if not len(recorded):
            return batch.req_ids[0], int(inputs.positions[0]), 0.0
        distances = (state.logits.cpu().float() - recorded.float()).abs().nan_to_num(0.0).amax(dim=1)
        row = int(distances.argmax())
        token = int(inputs.logits_indices_host[row])
        request = int((inputs.query_start_loc_host[1:] <= token).sum())
        return batch.req_ids[request], int(inputs.positions[token]), float(distances[row])
