"""Builds what a runner owns: tables, buffers, caches, graphs, and the eight stages over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import frozen

from ..stages.build_attn import BuildAttn
from ..stages.commit import Commit
from ..stages.coordinator import SoloCoordinator
from ..stages.dispatch import Dispatch, DispatchTable, UBatchPolicy
from ..stages.forward import Forward
from ..stages.forward_context import NO_TAPS
from ..stages.graphs import CUDAGraphRunner, PlanCache
from ..stages.input_buffers import InputBuffers
from ..stages.prepare_inputs import PrepareInputs
from ..stages.preprocess import Preprocess
from ..stages.request_table import RequestTable
from ..stages.sampling.columns import SamplingColumns
from ..stages.step_changes import StepLimits
from ..stages.ubatch_slice import SliceUBatches
from ..stages.update_states import UpdateStates
from .backends import kernels_for
from .config import DTYPES, EngineConfig
from .kv_cache import KVCache, kv_cache_groups
from .plugins import apply_stages
from .stage_set import StageSet

if TYPE_CHECKING:
    from ..fsm import StepMachine
    from ..stages.device import Device
    from ..stages.forward_context import ForwardTaps, Model
    from ..stages.specs import KVCacheGroupSpec


@frozen(kw_only=True, eq=False)
class Assembly:
    """One runner's parts. ``config`` is resolved; ``stages`` is what users edit."""

    config: EngineConfig
    groups: tuple[KVCacheGroupSpec, ...]
    kv_cache: KVCache
    table: RequestTable
    buffers: InputBuffers
    columns: SamplingColumns
    graphs: CUDAGraphRunner
    dispatch: Dispatch
    stages: StageSet


def assemble(
    model: Model,
    config: EngineConfig,
    machine: StepMachine,
    device: Device,
    on_error: Callable[[BaseException], None],
    taps: ForwardTaps = NO_TAPS,
) -> Assembly:
    """Everything for one model and one resolved configuration; stages are editable while ``machine`` is idle.

    Raises:
        PluginError, WiringError: a stage that the configuration names can't be found, made, or put in place.
    """
    spec = model.spec
    kernels = kernels_for(model, config, device)
    groups = kv_cache_groups(spec, config.block_size)
    columns = SamplingColumns(config.max_num_seqs * 2 + 1, spec.vocab_size)
    limits = _limits(config, spec.vocab_size)
    table = RequestTable(
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        groups=groups,
        columns=(columns,),
        device=device,
    )
    buffers = _buffers(config, table)
    kv_cache = KVCache(spec, limits.num_blocks, config.block_size, dtype=DTYPES[config.dtype], device=config.device)
    dispatch = _dispatch(config, kernels.graphs)
    update_states = UpdateStates(table, limits)
    forward = Forward(kernels.model, kv_cache.layers, groups, kernels.graphs, buffers.query_start_loc, taps)
    commit = Commit(table, spec.vocab_size, on_error, kernels.store)
    stages = StageSet(
        execute=(
            ("update_states", update_states),
            ("prepare_inputs", PrepareInputs(table, buffers, kernels.upload)),
            ("dispatch", dispatch),
            ("ubatch_slice", SliceUBatches(config.num_ubatches)),
            ("build_attn", BuildAttn(table, buffers, PlanCache(kernels.attention, groups))),
            ("preprocess", Preprocess(buffers)),
            ("forward", forward),
        ),
        sample=(("sample", kernels.sample(columns, table)), ("commit", commit)),
        skip=(("update_states", update_states), ("idle_dispatch", dispatch.idle_step)),
        between_steps=lambda call, work: machine.fire("dummy", work, call=call),
        on_graph_edit=kernels.graphs.drop,
    )
    parts = Assembly(
        config=config,
        groups=groups,
        kv_cache=kv_cache,
        table=table,
        buffers=buffers,
        columns=columns,
        graphs=kernels.graphs,
        dispatch=dispatch,
        stages=stages,
    )
    apply_stages(config.stages, parts)
    return parts


def _buffers(config: EngineConfig, table: RequestTable) -> InputBuffers:
    return InputBuffers(
        max_tokens=config.max_num_batched_tokens,
        max_reqs=config.max_num_seqs,
        block_tables=table.block_tables,
        device=table.device,
    )


def _limits(config: EngineConfig, vocab_size: int) -> StepLimits:
    return StepLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=_decided(config.max_model_len),
        num_blocks=_decided(config.num_kv_blocks),
        vocab_size=vocab_size,
        engine_seed=config.seed,
    )


def _dispatch(config: EngineConfig, graphs: CUDAGraphRunner) -> Dispatch:
    sizes = config.cudagraph_capture_sizes
    assert not isinstance(sizes, str), "an unresolved configuration reached assembly"
    table = DispatchTable(cudagraph_mode=config.cudagraph_mode, capture_sizes=sizes, max_num_seqs=config.max_num_seqs)
    ubatching = UBatchPolicy(
        num_ubatches=config.num_ubatches,
        decode_threshold=config.ubatch_decode_threshold,
        prefill_threshold=config.ubatch_prefill_threshold,
    )
    return Dispatch(table, graphs.captured, SoloCoordinator(), ubatching)


def _decided(value: int | str) -> int:
    assert isinstance(value, int), "an unresolved configuration reached assembly"
    return value
