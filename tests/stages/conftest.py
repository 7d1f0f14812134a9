"""Hand-made tables and scheduler outputs for tests of single stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from attrs import frozen
from twostroke.fsm import Transaction
from twostroke.stages.io import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from twostroke.stages.records import Batch
from twostroke.stages.request_table import RequestTable
from twostroke.stages.sampling.columns import SamplingColumns
from twostroke.stages.sampling_params import SamplingParams
from twostroke.stages.specs import KVCacheGroupSpec
from twostroke.stages.step_changes import StepLimits
from twostroke.stages.update_states import UpdateStates

GREEDY = SamplingParams(temperature=0.0)


@frozen
class TableKit:
    """A request table with its update_states stage; ``step`` applies a scheduler output and commits it."""

    table: RequestTable
    limits: StepLimits
    columns: SamplingColumns
    update_states: UpdateStates

    def step(self, output: SchedulerOutput, tokens: Mapping[str, int] | None = None) -> Batch:
        """Update, pretend that ``tokens`` were sampled, commit."""
        transaction = Transaction(1)
        batch = self.update_states(output, transaction)
        for req_id, token in (tokens or {}).items():
            row = self.table.rows[req_id]
            self.table.token_ids_host[row, self.table.num_tokens[row]] = token
            self.table.num_tokens[row] += 1
        transaction.commit()
        return batch

    def tokens(self, req_id: str) -> list[int]:
        """Every known token of a live request."""
        row = self.table.rows[req_id]
        return self.table.token_ids_host[row, : self.table.num_tokens[row]].tolist()

    def blocks(self, req_id: str, group: int = 0) -> list[int]:
        """Its block table."""
        row, table = self.table.rows[req_id], self.table.block_tables[group]
        return table.blocks[row, : table.counts[row]].tolist()

    def snapshot(self) -> dict[str, Any]:
        """Logical state: live rows up to their lengths, and what else a rollback must restore."""
        table = self.table
        rows = {
            req_id: (
                row,
                self.tokens(req_id),
                int(table.num_prompt_tokens[row]),
                int(table.num_computed_tokens[row]),
                bool(table.owes_prompt_logprobs[row]),
                [self.blocks(req_id, group) for group in range(len(table.block_tables))],
                self.columns.rows[row].tolist(),
            )
            for req_id, row in table.rows.items()
        }
        saved = {
            req_id: None if record.saved_tokens is None else record.saved_tokens.tolist()
            for req_id, record in table.records.items()
        }
        free = sorted(table._free_rows)
        return {"rows": rows, "saved": saved, "free": free}


def new(
    req_id: str,
    prompt: Sequence[int],
    blocks: Sequence[int] = (1, 2),
    computed: int = 0,
    params: SamplingParams = GREEDY,
    **more: Any,
) -> NewRequestData:
    """A new request with blocks of one group."""
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=list(prompt),
        block_ids=(list(blocks),),
        num_computed_tokens=computed,
        sampling_params=params,
        **more,
    )


def output(
    n: Mapping[str, int],
    new: Sequence[NewRequestData] = (),
    cached: CachedRequestData | None = None,
    **more: Any,
) -> SchedulerOutput:
    """A scheduler output whose total is the sum of its parts."""
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached or CachedRequestData(),
        num_scheduled_tokens=n,
        total_num_scheduled_tokens=more.pop("total", sum(n.values())),
        **more,
    )


def cached(ids: Sequence[str], computed: Sequence[int], blocks: Sequence[Any] = (), **more: Any) -> CachedRequestData:
    """Continued requests; ``blocks[i]`` are appended ids of one group, or None."""
    wrapped = [None if ids is None else (list(ids),) for ids in blocks]
    return CachedRequestData(req_ids=list(ids), num_computed_tokens=list(computed), new_block_ids=wrapped, **more)


@pytest.fixture
def make_kit() -> Callable[..., TableKit]:
    """Build a kit; keyword arguments override the limits."""

    def make(groups: int = 1, **limits: int) -> TableKit:
        values = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "max_model_len": 16,
            "num_blocks": 32,
            "vocab_size": 50,
            "engine_seed": 7,
        }
        values.update(limits)
        checked = StepLimits(**values)
        specs = [KVCacheGroupSpec(layers=(index,), block_size=4) for index in range(groups)]
        columns = SamplingColumns(values["max_num_seqs"] * 2 + 1, values["vocab_size"])
        table = RequestTable(
            max_num_seqs=values["max_num_seqs"],
            max_model_len=values["max_model_len"],
            groups=specs,
            columns=(columns,),
        )
        return TableKit(table, checked, columns, UpdateStates(table, checked))

    return make


@pytest.fixture
def kit(make_kit: Callable[..., TableKit]) -> TableKit:
    """A kit with the default limits."""
    return make_kit()


@pytest.fixture
def build() -> Any:
    """The builders of scheduler outputs: ``build.new``, ``build.output``, ``build.cached``."""

    class Build:
        new = staticmethod(new)
        output = staticmethod(output)
        cached = staticmethod(cached)
        empty_output = ModelRunnerOutput()

    return Build
