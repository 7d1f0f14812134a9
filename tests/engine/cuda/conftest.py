"""The CUDA path on a CPU: its kernels under Triton's interpreter, everything else as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import LIMITS
from twostroke.engine.attention.triton_paged import TritonPagedBackend
from twostroke.engine.backends import Kernels
from twostroke.engine.config import EngineConfig
from twostroke.engine.cuda.fused_decoder import FusedDecoder
from twostroke.engine.cuda.inputs import CudaInputs
from twostroke.engine.cuda.sample import CudaSample
from twostroke.engine.graphs import ClosureGraphRunner, EagerRunner
from twostroke.engine.kernels.tokens import TokenWriter
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models import Decoder
from twostroke.stages.device import Device


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where kernels are compiled, and keep decodes from being split over as many programs as fill a GPU."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the same on the GPU; the interpreter is for machines without one")
    monkeypatch.setattr("twostroke.engine.attention.triton_paged.MOST_SPLITS", 3)


def interpreted_kernels(model: Decoder, config: EngineConfig, device: Device) -> Kernels:
    """What a GPU computes with, but for its graphs, on this device."""
    torch_device = device.torch_device
    return Kernels(
        model=FusedDecoder(model, pdl=False),
        attention=TritonPagedBackend(model.spec, config.max_num_seqs, torch_device, pdl=False),
        graphs=EagerRunner() if config.cudagraph_mode == "NONE" else ClosureGraphRunner(),
        sample=lambda columns, table: CudaSample(columns, table, torch_device),
        store=TokenWriter(),
        upload=CudaInputs,
    )


@pytest.fixture
def make_fused_runner(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelRunner]:
    """``make_fused_runner(model, **changes)``: a ready runner over the CUDA path's kernels."""

    def make(model: Decoder, **changes: Any) -> ModelRunner:
        with monkeypatch.context() as patch:
            patch.setattr("twostroke.engine.assembly.kernels_for", interpreted_kernels)
            return build_runner(EngineConfig(**LIMITS | changes), model=model)

    return make
