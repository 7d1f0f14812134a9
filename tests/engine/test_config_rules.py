"""What a configuration becomes for a model on a device, and what is refused with which words; no device is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from twostroke.engine.config import EngineConfig, InvalidConfig
from twostroke.stages.specs import AttentionLayerSpec, ModelSpec

MIB = 2**20
LAYER = AttentionLayerSpec(num_heads=4, num_kv_heads=2, head_size=8, scale=1.0)
SPEC = ModelSpec(architecture="Any", vocab_size=64, hidden_size=32, max_position=128, attention_layers=(LAYER, LAYER))
BLOCK_BYTES = 2 * 2 * 16 * 2 * 8 * 4
"""Two layers, keys and values, 16 tokens of two heads of 8 float32."""

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


def resolve(on: torch.device = CPU, weights: torch.dtype = torch.float32, /, **options: Any) -> EngineConfig:
    """The configuration for weights of this type on this device."""
    return EngineConfig(**options).resolve(SPEC, device=on, dtype=weights)


def test_the_device_is_where_the_weights_lie() -> None:
    assert resolve(num_kv_blocks=9).device == "cpu"
    assert resolve(CUDA, num_kv_blocks=9).device == "cuda:1"
    for name in ("cuda", "cuda:1"):
        assert resolve(CUDA, device=name, num_kv_blocks=9).device == "cuda:1"


@pytest.mark.parametrize(("device", "name"), [(CUDA, "cpu"), (CUDA, "cuda:0"), (CPU, "cuda")])
def test_weights_on_another_device(device: torch.device, name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"weights lie on {device}, and the device is to be '{name}'"):
        resolve(device, device=name)


@pytest.mark.parametrize("name", ["tpu", "", "cuda:x", 5, None])
def test_an_unknown_device(name: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"device {name!r} is unknown; use 'cpu', 'cuda' or 'auto'"):
        resolve(device=name)


def test_a_device_without_kernels() -> None:
    with pytest.raises(InvalidConfig, match="device 'meta' is not supported; use 'cpu', 'cuda' or 'auto'"):
        resolve(torch.device("meta"))


def test_batch_invariance_is_for_cpus() -> None:
    assert resolve(batch_invariant=True, num_kv_blocks=9).batch_invariant
    with pytest.raises(InvalidConfig, match="batch_invariant has kernels for a CPU only; use device='cpu' with it"):
        resolve(CUDA, batch_invariant=True)


def test_graphs_are_the_default_on_a_gpu() -> None:
    assert resolve(num_kv_blocks=9).cudagraph_mode == "NONE"
    config = resolve(CUDA, num_kv_blocks=9, max_num_seqs=20)
    assert config.cudagraph_mode == "FULL_AND_PIECEWISE"
    assert config.cudagraph_capture_sizes == (1, 2, 4, 8, 16, 20)
    assert resolve(CUDA, num_kv_blocks=9, cudagraph_mode="NONE").cudagraph_capture_sizes == ()


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_the_dtype_is_that_of_the_weights(device: torch.device) -> None:
    for name in ("float32", "float16", "bfloat16"):
        assert resolve(device, getattr(torch, name), num_kv_blocks=9).dtype == name
    assert resolve(device, torch.bfloat16, dtype="float16", num_kv_blocks=9).dtype == "float16"
    with pytest.raises(InvalidConfig, match=r"weights of torch.float64 are not supported; use one of .*bfloat16"):
        resolve(device, torch.float64, num_kv_blocks=9)
    with pytest.raises(InvalidConfig, match=r"dtype 'int8' is unknown; use one of .*bfloat16.* or 'auto'"):
        resolve(device, dtype="int8")


def test_the_pool_has_as_many_blocks_as_its_bytes_hold() -> None:
    assert resolve(kv_cache_memory_bytes=10 * BLOCK_BYTES + 5).num_kv_blocks == 10
    assert resolve(CUDA, kv_cache_memory_bytes=10 * BLOCK_BYTES - 1).num_kv_blocks == 9
    assert resolve(CUDA, torch.bfloat16, kv_cache_memory_bytes=10 * BLOCK_BYTES).num_kv_blocks == 20
    assert resolve(num_kv_blocks=7, kv_cache_memory_bytes=100 * BLOCK_BYTES).num_kv_blocks == 7


def test_an_automatic_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve().num_kv_blocks == 512 * MIB // BLOCK_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * MIB, 16 * MIB) if device == CUDA else None)
    assert resolve(CUDA).num_kv_blocks == 8 * MIB // BLOCK_BYTES


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_pool_too_small_for_a_block(device: torch.device) -> None:
    with pytest.raises(InvalidConfig, match=f"5000 bytes hold no KV-cache block of {BLOCK_BYTES} bytes; raise kv_c"):
        resolve(device, kv_cache_memory_bytes=5000)


@pytest.mark.parametrize("value", [0, -1, "4GB", None, 1.5e6, True])
def test_bytes_that_are_no_number_of_bytes(value: Any) -> None:
    with pytest.raises(InvalidConfig, match="kv_cache_memory_bytes must be an integer of at least 1 or 'auto'"):
        resolve(kv_cache_memory_bytes=value)


@pytest.mark.parametrize("value", [0, -0.5, 1.01, "0.9", None, True, float("nan")])
def test_shares_of_memory_that_are_none(value: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"gpu_memory_utilization must be above 0 and at most 1, got {value!r}"):
        resolve(gpu_memory_utilization=value)


def test_the_longest_request_fits_the_pool() -> None:
    assert resolve(num_kv_blocks=5).max_model_len == 64
    assert resolve(num_kv_blocks=100).max_model_len == 128
    with pytest.raises(InvalidConfig, match="max_model_len 65 does not fit the KV cache of 64 tokens; lower max_mod"):
        resolve(num_kv_blocks=5, max_model_len=65)
