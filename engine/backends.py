"""What computes on each kind of device: the model's form, attention, sampling and graphs that go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from ..stages.commit import TokenStore, store_tokens
from ..stages.device import Device, HostDevice
from ..stages.input_upload import InputUpload, input_upload
from ..stages.sample import Sample
from .attention.invariant_cpu import InvariantCPUBackend
from .attention.paged_cpu import PagedCPUBackend
from .config import EngineConfig
from .graphs import ClosureGraphRunner, EagerRunner
from .models import Decoder
from .models.compiled import CompiledModel
from .models.invariant import InvariantModel
from .native.attention import NativeCPUBackend
from .native.library import load_native

if TYPE_CHECKING:
    from ..stages.attention import AttentionBackend
    from ..stages.forward_context import Model
    from ..stages.graphs import CUDAGraphRunner
    from ..stages.input_buffers import InputBuffers
    from ..stages.request_table import RequestTable
    from ..stages.sampling.columns import SamplingColumns
    from ..stages.sampling.step import TokenHistory

PDL_CAPABILITY = (9, 0)
"""The first compute capability with programmatic dependent launch."""


@frozen(kw_only=True, eq=False)
class Kernels:
    """Parts of a runner that differ with the device.

    ``upload`` makes what brings the inputs there, ``sample`` the sample stage; ``store`` keeps its tokens.
    """

    model: Model
    attention: AttentionBackend
    graphs: CUDAGraphRunner
    sample: Callable[[SamplingColumns, TokenHistory], Callable[..., object]] = Sample
    store: TokenStore = store_tokens
    upload: Callable[[RequestTable, InputBuffers], InputUpload] = input_upload


def kernels_for(model: Model, config: EngineConfig, device: Device) -> Kernels:
    """The parts for a resolved configuration."""
    if device.torch_device.type == "cuda":
        return _cuda(model, config, device)
    graphs = EagerRunner() if config.cudagraph_mode == "NONE" else ClosureGraphRunner()
    if config.batch_invariant:
        return Kernels(model=InvariantModel(model), attention=InvariantCPUBackend(), graphs=graphs)
    if config.compile:
        model = CompiledModel(model)
    library = load_native("attention") if config.native else None
    attention = PagedCPUBackend() if library is None else NativeCPUBackend(library)
    return Kernels(model=model, attention=attention, graphs=graphs)


def device_for(name: str) -> Device:
    """The device of a resolved configuration."""
    if torch.device(name).type == "cpu":
        return HostDevice()
    from .cuda.device import CudaDevice

    return CudaDevice(name)


def _cuda(model: Model, config: EngineConfig, where: Device) -> Kernels:
    from .cuda.attention import cuda_attention
    from .cuda.fused_decoder import FusedDecoder, fuses
    from .cuda.graphs import CudaGraphRunner
    from .cuda.inputs import CudaInputs
    from .cuda.sample import CudaSample
    from .kernels.tokens import TokenWriter

    device = where.torch_device
    pdl = torch.cuda.get_device_capability(device) >= PDL_CAPABILITY
    if isinstance(model, Decoder) and fuses(model):
        model = FusedDecoder(model, pdl=pdl)
    graphs = EagerRunner() if config.cudagraph_mode == "NONE" else CudaGraphRunner(device)

    def sample(columns: SamplingColumns, table: TokenHistory) -> CudaSample:
        stage = CudaSample(columns, table, device, graphs if isinstance(graphs, CudaGraphRunner) else None)
        stage.warm_up()
        return stage

    return Kernels(
        model=model,
        attention=cuda_attention(model.spec, config, where, pdl=pdl),
        graphs=graphs,
        sample=sample,
        store=TokenWriter(),
        upload=CudaInputs,
    )
