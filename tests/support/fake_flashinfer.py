"""FlashInfer's wrappers in a few lines of torch: what they are given to plan decides what they compute.

Arguments and attributes are those of release 0.6.13. A fixed ("CUDA graph") wrapper reads nothing but its buffers when
it runs, so running it again after another plan is what replaying a graph does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from attrs import define, field
from twostroke.stages.device import Device, HostDevice


@define(eq=False, slots=False)
class Fake:
    """Stands for the module. ``plans`` and ``runs`` hold what was asked of it, in order."""

    device: Device = field(factory=HostDevice)
    plans: list[tuple[Any, dict[str, Any]]] = field(factory=list)
    runs: list[tuple[Any, tuple[Any, ...]]] = field(factory=list)
    __version__ = "0"
    __name__ = "no_such_flashinfer"

    def BatchDecodeWithPagedKVCacheWrapper(self, workspace: torch.Tensor, layout: str, **options: Any) -> Decode:
        return Decode(self, workspace, layout, **options)

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: torch.Tensor, layout: str, **options: Any) -> Prefill:
        return Prefill(self, workspace, layout, **options)

    def fast_decode_plan(
        self, wrapper: Decode, *args: Any, global_override_indptr_cpu: torch.Tensor, **options: Any
    ) -> None:
        wrapper.fast_plan(global_override_indptr_cpu, *args, **options)

    def upload(self, wrapper: Wrapper) -> None:
        """A schedule, by way of pinned memory."""
        wrapper._pin_memory_int_workspace_buffer[:64] = torch.randint(1, 255, (64,), dtype=torch.uint8)
        self.device.upload(wrapper._pin_memory_int_workspace_buffer[:64], wrapper._int_workspace_buffer[:64])


class Wrapper:
    """What both have in common."""

    _int_workspace_buffer: torch.Tensor
    _pin_memory_int_workspace_buffer: torch.Tensor

    def __init__(self, fake: Fake, workspace: torch.Tensor, layout: str, use_cuda_graph: bool) -> None:
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8
        self.fake, self.is_fixed = fake, use_cuda_graph
        self.starts = self.offsets = self.pages = self.last = torch.empty(0, dtype=torch.int32)
        self.options: dict[str, Any] = {}

    def note(self, **planned: Any) -> None:
        """Remember a plan with the values that its tensors have now."""
        values = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in planned.items()}
        self.options = values
        self.fake.plans.append((self, values))
        self.fake.upload(self)

    def attend(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """Attention of the rows that ``starts`` gives each request, to the pages that the lists give it."""
        keys, values = cache
        page = keys.shape[1]
        assert page == self.options["page_size"]
        for index in range(len(self.last)):
            first, stop = int(self.offsets[index]), int(self.offsets[index + 1])
            row, end = int(self.starts[index]), int(self.starts[index + 1])
            if row == end:
                continue
            length = (stop - first - 1) * page + int(self.last[index]) if stop > first else 0
            blocks = self.pages[first:stop].long()
            own_keys = keys[blocks].flatten(0, 1)[:length].float()
            own_values = values[blocks].flatten(0, 1)[:length].float()
            out[row:end] = _dense(query[row:end].float(), own_keys, own_values, self.options).to(out.dtype)


class Decode(Wrapper):
    """One query a request."""

    def __init__(
        self,
        fake: Fake,
        workspace: torch.Tensor,
        layout: str,
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        super().__init__(fake, workspace, layout, use_cuda_graph)
        self.use_tensor_cores, self.is_loaded = use_tensor_cores, False
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self.offsets, self.pages = paged_kv_indptr_buffer, paged_kv_indices_buffer
            self.last = paged_kv_last_page_len_buffer

    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *args: Any, **kw: Any):
        self.is_loaded = True
        if self.is_fixed:
            self.offsets.copy_(indptr)
            self.last.copy_(last_page_len)
            self.pages[: len(indices)].copy_(indices)
        self.fast_plan(indptr, indptr, indices, last_page_len, *args, **kw)

    def fast_plan(
        self,
        offsets_host: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert self.is_loaded, "fast_decode_plan needs a plan before"
        assert offsets_host.dtype == torch.int32
        assert offsets_host.device.type == "cpu"
        assert len(offsets_host) == len(last_page_len) + 1
        if self.is_fixed:
            assert len(last_page_len) == len(self.last), "the batch size of a graph is fixed"
        else:
            self.offsets, self.pages, self.last = indptr, indices, last_page_len
        self.starts = torch.arange(len(last_page_len) + 1)
        sizes = {"heads": (num_qo_heads, num_kv_heads, head_dim), "page_size": page_size}
        self.note(kind="decode", offsets=offsets_host, last=last_page_len, **sizes, **options)

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        assert len(query) == len(self.last)
        self.fake.runs.append((self, (query, cache, out)))
        self.attend(query, cache, out)


class Prefill(Wrapper):
    """Any number of queries a request."""

    def __init__(
        self,
        fake: Fake,
        workspace: torch.Tensor,
        layout: str,
        *,
        backend: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
    ) -> None:
        super().__init__(fake, workspace, layout, use_cuda_graph)
        assert backend in ("fa2", "fa3")
        assert not (use_cuda_graph and backend == "fa3"), "its schedule has no bound"
        self.backend, self.most_rows, self._qo_indptr_last = backend, 0, 0
        if use_cuda_graph:
            assert qo_indptr_buf is not None
            assert paged_kv_indptr_buf is not None
            assert paged_kv_indices_buf is not None
            assert paged_kv_last_page_len_buf is not None
            self.starts, self.offsets, self.pages = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf
            self.last = paged_kv_last_page_len_buf

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        seq_lens: torch.Tensor,
        max_token_per_sequence: int,
        **options: Any,
    ) -> None:
        assert causal
        self._qo_indptr_last = int(qo_indptr[-1])
        if self.is_fixed:
            self.most_rows = self.most_rows or self._qo_indptr_last
            assert self._qo_indptr_last <= self.most_rows, "a graph's plan has no more rows than its first"
            assert len(qo_indptr) == len(self.starts)
            for buffer, given in zip(
                (self.starts, self.offsets, self.last),
                (qo_indptr, paged_kv_indptr, paged_kv_last_page_len),
                strict=True,
            ):
                self.fake.device.upload(given, buffer)
        else:
            device = paged_kv_indices.device
            self.starts, self.offsets = qo_indptr.to(device, copy=True), paged_kv_indptr.to(device, copy=True)
            self.pages, self.last = paged_kv_indices, paged_kv_last_page_len.to(device, copy=True)
        sizes = {"heads": (num_qo_heads, num_kv_heads, head_dim_qk), "page_size": page_size}
        given = {"offsets": paged_kv_indptr, "last": paged_kv_last_page_len, "starts": qo_indptr, "seq_lens": seq_lens}
        self.note(kind=self.backend, most_queries=max_token_per_sequence, **given, **sizes, **options)

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        assert len(query) == self._qo_indptr_last
        self.fake.runs.append((self, (query, cache, out)))
        self.attend(query, cache, out)


def _dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    count, length = len(query), len(keys)
    if not length:
        return torch.zeros_like(query)
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * options["sm_scale"]
    if options["logits_soft_cap"]:
        scores = options["logits_soft_cap"] * torch.tanh(scores / options["logits_soft_cap"])
    reach = torch.arange(length - count, length, device=query.device)[:, None]
    places = torch.arange(length, device=query.device)
    hidden = places > reach
    if options["window_left"] >= 0:
        hidden |= places < reach - options["window_left"]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def modules(built: set[str]) -> dict[str, Any]:
    """``flashinfer`` and ``flashinfer.jit.attention`` for ``sys.modules``, with these kernels built."""
    fake = Fake()
    fake.__name__ = "flashinfer"  # pyright: ignore[reportAttributeAccessIssue]

    def gen_batch_decode_module(*args: Any) -> SimpleNamespace:
        assert len(args) == 9
        return SimpleNamespace(is_compiled="decode" in built)

    def gen_batch_prefill_module(backend: str, *args: Any) -> SimpleNamespace:
        assert len(args) == 10
        return SimpleNamespace(is_compiled=backend in built)

    attention = SimpleNamespace(
        gen_batch_decode_module=gen_batch_decode_module, gen_batch_prefill_module=gen_batch_prefill_module
    )
    return {"flashinfer": fake, "flashinfer.jit": SimpleNamespace(), "flashinfer.jit.attention": attention}
