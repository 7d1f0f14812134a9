"""What a step may not exceed, and what an accepted scheduler output is to change in the request table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from .io import BlockIds
from .records import DecodeRun
from .request_table import RequestRecord, TokenArray


@frozen(kw_only=True)
class StepLimits:
    """What a step may not exceed. ``num_blocks`` includes the null block."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    vocab_size: int
    engine_seed: int = 0


@frozen(eq=False)
class Binding:
    """A request that gets a fresh row: its record, every known token, its blocks, and how many tokens are computed."""

    record: RequestRecord
    tokens: TokenArray
    block_ids: BlockIds
    num_computed_tokens: int
    is_new: bool


@frozen(eq=False)
class Continuation:
    """Requests that keep their rows (parallel), and the few of them that also get blocks or other tokens, by row.

    Those that get one block of each KV-cache group may be given as arrays: ``one_block_rows`` ``[n]``, and
    ``one_block_ids`` ``[n, num_groups]``. ``run`` is the run of steps that the step belongs to, where it is in one.
    """

    req_ids: Sequence[str]
    rows: npt.NDArray[np.int64]
    num_scheduled_tokens: npt.NDArray[np.int64]
    num_computed_tokens: npt.NDArray[np.int64]
    blocks: Sequence[tuple[int, BlockIds]]
    tokens: Sequence[tuple[int, int, TokenArray]]
    one_block_rows: npt.NDArray[np.int64] | None = None
    one_block_ids: npt.NDArray[np.int64] | None = None
    run: DecodeRun | None = None


@frozen(eq=False)
class StepChanges:
    """What update_states is to do, in this order."""

    finished: Sequence[RequestRecord]
    preempted: Sequence[RequestRecord]
    bindings: Sequence[Binding]
    continued: Continuation
