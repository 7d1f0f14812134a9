"""The choice among attention kernels: measured times, the file they are kept in, and who gets a step."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import GPU_OR_CPU, Case, World
from attrs import evolve
from fake_flashinfer import modules
from twostroke.engine.attention.chosen import ChosenBackend, ChosenPlan
from twostroke.engine.attention.flashinfer_library import (
    AttentionKernel,
    FixedChoice,
    FlashInfer,
    FlashInferMissing,
    FlashInferUnsupported,
)
from twostroke.engine.attention.flashinfer_paged import FlashInferBackend
from twostroke.engine.attention.triton_paged import TritonPagedBackend
from twostroke.engine.backends import device_for
from twostroke.engine.config import EngineConfig
from twostroke.engine.cuda.attention import cuda_attention
from twostroke.engine.cuda.attention_choice import (
    AttentionTimes,
    MeasuredChoice,
    TimesFile,
    measured_choice,
    times_key,
    times_path,
)
from twostroke.engine.cuda.attention_timing import AttentionPool, TimedShape, measure_attention

TRITON, CUDA_CORES, TENSOR_CORES = AttentionKernel.TRITON, AttentionKernel.CUDA_CORES, AttentionKernel.TENSOR_CORES
FA2, FA3 = AttentionKernel.FA2, AttentionKernel.FA3
TIMES = AttentionTimes(
    {1: {TRITON: (4.0, 9.0), CUDA_CORES: (5.0, 8.0)}, 64: {TRITON: (90.0, 300.0), CUDA_CORES: (80.0, 280.0)}},
    {TRITON: (500.0, 90.0), FA3: (200.0, 40.0)},
)
ONLY_TRITON = AttentionTimes({1: {TRITON: (4.0,), CUDA_CORES: (5.0,)}}, {TRITON: (9.0,), FA2: (10.0,)})
CASE = Case(requests=[(0, 1)], head_size=64, block_size=16, dtype=torch.float16)
EVERYTHING = {"decode", "fa2", "fa3"}


def test_the_fastest_kernel_of_the_nearest_size() -> None:
    choice = MeasuredChoice(TIMES)
    assert choice.decode(1) is TRITON  # 4 * 9 < 5 * 8: by the product, not by one case
    assert [choice.decode(count) for count in (7, 9, 64, 500, 7)] == [
        TRITON,
        CUDA_CORES,
        CUDA_CORES,
        CUDA_CORES,
        TRITON,
    ]
    assert choice.mixed() is FA3
    assert choice.kernels() == {TRITON, CUDA_CORES, FA3}


def test_times_are_measured_once_and_kept(tmp_path: Path) -> None:
    path, calls = tmp_path / "sub" / "times.json", []

    def measure() -> AttentionTimes:
        calls.append(0)
        return TIMES

    for _ in range(2):
        assert measured_choice(TimesFile(path), "a", measure).times == TIMES
    assert len(calls) == 1
    assert measured_choice(TimesFile(path), "b", lambda: ONLY_TRITON).times == ONLY_TRITON
    assert TimesFile(path).read("a") == TIMES
    assert [entry.name for entry in path.parent.iterdir()] == ["times.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        '{"a": 5}',
        '{"a": {"decode": {}, "mixed": {"triton": [1]}}}',
        '{"a": {"decode": {"1": {"triton": [1]}}}}',
        '{"a": {"decode": {"1": {"no such kernel": [1]}}, "mixed": {"triton": [1]}}}',
        '{"a": {"decode": {"0": {"triton": [1]}}, "mixed": {"triton": [1]}}}',
        '{"a": {"decode": {"1": {"triton": [1], "flashinfer-fa2": []}}, "mixed": {"triton": [1]}}}',
        '{"a": {"decode": {"1": {"triton": [NaN]}}, "mixed": {"triton": [1]}}}',
        '{"a": {"decode": {"1": {}}, "mixed": {"triton": [1]}}}',
        b"\xff\xfe",
    ],
)
def test_a_file_that_cannot_be_used_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | bytes
) -> None:
    path = tmp_path / "times.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert measured_choice(TimesFile(path), "a", lambda: TIMES).times == TIMES
    assert "measured again" in caplog.text
    assert AttentionTimes.from_json(json.loads(path.read_text())["a"]) == TIMES


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    assert measured_choice(TimesFile(tmp_path / "file" / "times.json"), "a", lambda: TIMES).times == TIMES
    assert "cannot be kept, and are measured at each start" in caplog.text


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = times_path(torch.device("cpu"), FlashInfer(modules(set())["flashinfer"]))
    assert path.parent == tmp_path / "twostroke"
    assert path.name.startswith(f"attention-cpu-torch{torch.__version__}-triton")
    assert "-flashinfer0-" in path.name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = times_path(torch.device("cpu"), FlashInfer(modules(set())["flashinfer"]))
    assert path.parent == tmp_path / "home" / ".cache" / "twostroke"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert times_path(torch.device("cpu"), FlashInfer(modules(set())["flashinfer"])) == path


def test_a_key_names_everything_that_times_depend_on() -> None:
    base = ((CASE.layer,), torch.float16, 16, (CUDA_CORES, FA2))
    keys = {
        times_key(*base),
        times_key((evolve(CASE, window=5).layer,), *base[1:]),
        times_key((evolve(CASE, group_size=1).layer,), *base[1:]),
        times_key((CASE.layer, evolve(CASE, soft_cap=2.0).layer), *base[1:]),
        times_key(base[0], torch.bfloat16, *base[2:]),
        times_key(*base[:2], 32, base[3]),
        times_key(*base[:3], (CUDA_CORES,)),
    }
    assert len(keys) == 7
    assert times_key(*base[:3], (FA2, CUDA_CORES)) == times_key(*base)


class Noted:
    """A plan that says it was asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def plan(self, batch: Any) -> None:
        self.asked.append(f"plan {self.name}")

    def run(self, query: torch.Tensor, key: Any, value: Any, kv_cache: torch.Tensor, layer: Any) -> torch.Tensor:
        self.asked.append(f"run {self.name}")
        return query


@pytest.mark.parametrize(
    ("choice", "requests", "in_graph", "taken"),
    [
        (FixedChoice(CUDA_CORES, TRITON), [(3, 1)] * 3, True, "triton"),
        (FixedChoice(CUDA_CORES, TRITON), [(3, 1)] * 3, False, "flashinfer"),
        (FixedChoice(CUDA_CORES, TRITON), [(3, 2)], False, "triton"),
        (FixedChoice(TRITON, FA3), [(3, 1)] * 3, True, "triton"),
        (FixedChoice(TRITON, FA3), [(3, 1)] * 3, False, "triton"),
        (FixedChoice(TRITON, FA3), [(3, 2), (4, 1)], False, "flashinfer"),
        (FixedChoice(TRITON, FA3), [(3, 2), (4, 1)], True, "triton"),
        (FixedChoice(TENSOR_CORES, TRITON), [(3, 1)], True, "triton"),
        (FixedChoice(TENSOR_CORES, TRITON), [(3, 1)], False, "triton"),
    ],
)
def test_who_gets_a_step(choice: FixedChoice, requests: list[tuple[int, int]], in_graph: bool, taken: str) -> None:
    asked: list[str] = []
    plan = ChosenPlan(Noted("triton", asked), Noted("flashinfer", asked), choice)
    world = World(evolve(CASE, requests=requests))
    plan.plan(evolve(world.batch(), in_graph=in_graph))
    query, key, value = world.inputs()
    plan.run(query, key, value, world.kv_cache, world.case.layer)
    assert asked == [f"plan {taken}", f"run {taken}"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[set[str]], None]:
    """Makes the stand-in importable with these kernels built; the cache folder is a new one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def install(built: set[str]) -> None:
        for name, module in modules(built).items():
            monkeypatch.setitem(sys.modules, name, module)

    return install


def backend(case: Case = CASE, **options: Any) -> Any:
    """The backend of a configuration, as a GPU would get it."""
    dtype = str(case.dtype).removeprefix("torch.")
    config = EngineConfig(dtype=dtype, max_model_len=64, max_num_seqs=4, **options)  # pyright: ignore[reportArgumentType]
    return cuda_attention(case.spec, config, device_for(str(GPU_OR_CPU)), pdl=False)


def never(*args: Any) -> AttentionTimes:
    raise AssertionError("measured")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., AttentionTimes]], None]:
    """Puts a function in place of the measurement."""
    return lambda measure: monkeypatch.setattr("twostroke.engine.cuda.attention.measure_attention", measure)


def test_a_backend_by_name(installed: Any, measured: Any) -> None:
    measured(never)
    installed(EVERYTHING)
    assert isinstance(backend(attention_backend="triton"), TritonPagedBackend)
    assert isinstance(backend(attention_backend="flashinfer"), FlashInferBackend)
    with pytest.raises(FlashInferUnsupported, match=r"not for torch\.float32"):
        backend(evolve(CASE, dtype=torch.float32), attention_backend="flashinfer")


def test_without_flashinfer_triton_is_taken_unmeasured(monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    measured(never)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert isinstance(backend(), TritonPagedBackend)
    with pytest.raises(FlashInferMissing):
        backend(attention_backend="flashinfer")


@pytest.mark.parametrize(("built", "changes"), [(set(), {}), (EVERYTHING, {"head_size": 8})])
def test_nothing_is_measured_where_no_kernel_serves(
    installed: Any, measured: Any, caplog: pytest.LogCaptureFixture, built: set[str], changes: dict[str, Any]
) -> None:
    measured(never)
    installed(built)
    with caplog.at_level(logging.INFO):
        assert isinstance(backend(evolve(CASE, **changes)), TritonPagedBackend)
    assert "attention by Triton: " in caplog.text


def test_the_kernels_that_are_built_are_measured_once(installed: Any, measured: Any) -> None:
    installed({"decode", "fa2"})
    asked: list[tuple[AttentionKernel, ...]] = []

    def measure(shape: TimedShape, library: FlashInfer, kernels: tuple[AttentionKernel, ...]) -> AttentionTimes:
        asked.append(kernels)
        assert (shape.layer, shape.dtype, shape.block_size) == (CASE.layer, torch.float16, 16)
        return TIMES

    measured(measure)
    for _ in range(2):
        got = backend()
        assert isinstance(got, ChosenBackend)
        (choice,) = got.choices.values()
        assert (choice.decode(2), choice.decode(40), choice.mixed()) == (TRITON, CUDA_CORES, FA3)
    assert asked == [(CUDA_CORES, TENSOR_CORES, FA2)]


def test_where_triton_is_always_the_fastest(installed: Any, measured: Any) -> None:
    installed(EVERYTHING)
    measured(lambda *args: ONLY_TRITON)
    assert isinstance(backend(), TritonPagedBackend)


@pytest.mark.parametrize("requests", [[(511, 1)] * 2, [(0, 100), (63, 1)], [(2047, 1)] * 8])
def test_batches_for_a_measurement_lie_in_the_pool(requests: list[tuple[int, int]]) -> None:
    shape = TimedShape(layer=CASE.layer, dtype=CASE.dtype, block_size=16, device=device_for(str(GPU_OR_CPU)), pdl=False)
    pool = AttentionPool(shape, num_bytes=2**22)
    assert pool.num_pages == 2**22 // (2 * 16 * 2 * 64 * 2)
    batch, caches = pool.batch(requests, in_graph=True)
    assert batch.in_graph
    assert batch.block_table.shape == (len(requests), -(-max(map(sum, requests)) // 16))
    assert batch.query_start_loc_host.tolist()[-1] == batch.num_tokens == sum(count for _, count in requests)
    assert int(batch.block_table.min()) >= 0
    assert all(int(batch.block_table.max()) < cache.shape[1] for cache in caches)
    assert len({cache.data_ptr() for cache in caches}) == len(caches)
    if batch.block_table.numel() <= pool.num_pages // 2:
        assert len(caches) == min(pool.num_pages // batch.block_table.numel(), 64)
        assert batch.block_table.unique().numel() == batch.block_table.numel()


def test_a_kernel_that_fails_is_left_out_of_the_measurement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def timed(plan: Any, num_tokens: int) -> float:
        if "FlashInfer" in type(plan).__name__ and plan._choice.decode(1) is FA2 and num_tokens > 4000:
            raise RuntimeError("no kernel image")
        return float(num_tokens)

    monkeypatch.setattr(
        "twostroke.engine.cuda.attention_timing.attention_time_us",
        lambda shape, pool, plan, requests: timed(plan, sum(count for _, count in requests)),
    )
    monkeypatch.setattr("twostroke.engine.cuda.attention_timing.POOL_BYTES", 2**20)
    shape = TimedShape(layer=CASE.layer, dtype=CASE.dtype, block_size=16, device=device_for(str(GPU_OR_CPU)), pdl=False)
    library = FlashInfer(modules(EVERYTHING)["flashinfer"])
    times = measure_attention(shape, library, (CUDA_CORES, FA3, FA2))
    assert times.mixed.keys() == {TRITON, FA3}
    assert all(by_kernel.keys() == {TRITON, CUDA_CORES} for by_kernel in times.decode.values())
    assert times.decode[64][TRITON] == (64.0, 64.0)
    assert "flashinfer-fa2 is not used: RuntimeError: no kernel image" in caplog.text
    assert AttentionTimes.from_json(json.loads(json.dumps(times.to_json()))) == times
