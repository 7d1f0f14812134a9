"""For tests of models: run one over a whole sequence without a cache, and the packaged model, loaded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from twostroke.engine.loading import LoadedModel, load_model
from twostroke.stages.attention import AttentionBatch
from twostroke.stages.forward_context import ForwardContext, Model
from twostroke.stages.records import EAGER_SEGMENTS, ModelInputs, SegmentRunner
from twostroke.stages.specs import AttentionLayerSpec


class WholeSequence:
    """An attention plan for one request whose tokens are all in the batch: nothing is cached."""

    def plan(self, batch: AttentionBatch) -> None:
        """Nothing to plan."""

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Causal attention, windowed where the layer is."""
        assert key is not None, "there is no cache where it could lie"
        assert value is not None
        index = torch.arange(query.shape[0])
        distance = index[:, None] - index
        mask = (distance >= 0) & (distance < (layer.sliding_window or len(index)))
        heads = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        output = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=layer.scale, enable_gqa=True)
        return output[0].transpose(0, 1).contiguous()


@pytest.fixture
def logits_of() -> Callable[..., torch.Tensor]:
    """``logits_of(model, token_ids)``: float32 logits ``[num_tokens, vocab]`` of one sequence."""

    def logits(
        model: Model,
        token_ids: Sequence[int],
        *,
        segments: SegmentRunner = EAGER_SEGMENTS,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_layers = len(model.spec.attention_layers)
        context = ForwardContext(
            model.spec, [WholeSequence()] * num_layers, [torch.empty(0)] * num_layers, segments=segments
        )
        ids = torch.tensor(token_ids, dtype=torch.int32)
        inputs = ModelInputs(ids, torch.arange(len(token_ids)), inputs_embeds=inputs_embeds)
        with torch.inference_mode():
            return model.compute_logits(model.forward(inputs, context))

    return logits


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The packaged SmolLM2 on a CPU in float32. Tests that use it are marked ``model``."""
    return load_model("smollm2", device="cpu", dtype="float32")
