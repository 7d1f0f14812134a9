"""Random steps: who goes on, who comes in and how, who is preempted or set back, in which order all is listed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

from attrs import frozen
from books import Books, Entry, Plan, Ticket
from twostroke.engine.config import EngineConfig
from twostroke.stages.io import CachedRequestData, NewRequestData, SchedulerOutput

T = TypeVar("T")


@frozen(kw_only=True)
class Habits:
    """Probabilities: that a request is scheduled, that all its tokens are, that it is preempted, that it is set back.

    ``only`` restricts the step to requests of a kind: "decode" (one token left), "resume" (preempted ones).
    """

    pick: float = 0.8
    whole: float = 0.5
    preempt: float = 0.1
    rewind: float = 0.05
    only: str = ""


class Planner:
    """Makes plans from the books. ``happened`` counts what they contain."""

    def __init__(self, config: EngineConfig, num_groups: int, books: Books, happened: Counter[str]) -> None:
        self._config = config
        self._num_groups = num_groups
        self._books = books
        self._happened = happened

    def plan(self, chooser: random.Random, habits: Habits) -> Plan:
        """A step; it may schedule nothing."""
        books, config = self._books, self._config
        preempted = [ticket for ticket in books.running if chooser.random() < habits.preempt]
        rows = config.max_num_seqs - len(books.running) + len(preempted)
        budget = config.max_num_batched_tokens
        entries: list[Entry] = []
        for ticket in shuffled(chooser, books.tickets.values()):
            is_fresh = ticket.status != "running" or ticket in preempted
            if budget == 0 or len(entries) == config.max_num_seqs or (is_fresh and rows == 0):
                continue
            if (ticket.is_spoilt and is_fresh) or not _fits(ticket, habits.only) or chooser.random() > habits.pick:
                continue
            known, start = self._extent(chooser, habits, ticket, is_fresh)
            if known - len(ticket.wish.prompt) >= ticket.wish.max_tokens:
                continue
            make = self._fresh if is_fresh else self._continued
            count = min(known - start, budget)
            count = count if chooser.random() < habits.whole else chooser.randint(1, count)
            entry = make(chooser, ticket, (start, count, known))
            entries.append(entry)
            self._happened["scheduled after its logits were spoilt"] += ticket.is_spoilt
            budget -= entry.count
            rows -= is_fresh
        return Plan(tuple(entries), tuple(preempted), self._output(chooser, entries, preempted))

    def _extent(self, chooser: random.Random, habits: Habits, ticket: Ticket, is_fresh: bool) -> tuple[int, int]:
        """How many tokens count as known, and how many as computed."""
        known, start = len(ticket.tokens), 0 if is_fresh else ticket.computed
        if ticket.status != "new" and chooser.random() < habits.rewind:
            known = chooser.randint(max(len(ticket.wish.prompt), known - 3), known)
            start = min(start, known - 1)
            start = chooser.randint(max(start - 3, 0), start)
            self._happened["rewind"] += 1
            self._happened["rewind in flight"] += not ticket.is_settled
        return known, start

    def _continued(self, chooser: random.Random, ticket: Ticket, extent: tuple[int, int, int]) -> Entry:
        start, count, known = extent
        need = -(-(start + count) // self._config.block_size)
        blocks = [self._books.blocks.take(max(need - len(held), 0)) for held in ticket.blocks]
        is_decode = known > len(ticket.wish.prompt) and count == 1
        self._happened["decode" if is_decode else "chunk"] += 1
        return Entry(ticket, "continued", start, count, known, blocks)

    def _fresh(self, chooser: random.Random, ticket: Ticket, extent: tuple[int, int, int]) -> Entry:
        _, count, known = extent
        how = "new"
        if ticket.status != "new":
            with_tokens = ["with all_token_ids", "as new"] if ticket.is_settled else []
            how = chooser.choice(["without tokens", *with_tokens])
            self._happened[f"resume {how}"] += 1
            self._happened["resume in flight"] += not ticket.is_settled
            self._happened["resume in the step of its preemption"] += ticket.status == "running"
        shared = self._hit(chooser, ticket, known)
        start = len(shared[0]) * self._config.block_size
        count = min(count, known - start)
        need = -(-(start + count) // self._config.block_size)
        for ids in shared:
            self._books.blocks.share(ids)
        return Entry(
            ticket, how, start, count, known, [ids + self._books.blocks.take(need - len(ids)) for ids in shared]
        )

    def _hit(self, chooser: random.Random, ticket: Ticket, known: int) -> list[list[int]]:
        """Full blocks of another request, living or dead, that holds the same tokens."""
        size, tokens = self._config.block_size, ticket.truth[:known]
        living = [(donor.truth[: donor.computed], donor.blocks, "live") for donor in self._living_donors()]
        finished = [(donor, blocks, "finished") for donor, blocks in self._books.donors]
        for donor, blocks, kind in shuffled(chooser, living + finished):
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(donor, tokens[:-1], strict=False)))
            count = equal // size
            if ticket.wants_table:
                count = min(count, ticket.num_scored // size)
            if count:
                count = chooser.randint(1, count)
                self._happened[f"prefix hit, {kind}"] += 1
                return [ids[:count] for ids in blocks]
        return [[] for _ in range(self._num_groups)]

    def _living_donors(self) -> Iterable[Ticket]:
        return (ticket for ticket in self._books.running if not ticket.is_spoilt)

    def _output(self, chooser: random.Random, entries: Sequence[Entry], preempted: Sequence[Ticket]) -> SchedulerOutput:
        """The scheduler's way of saying it, with every list and dict in an order of its own."""
        as_new = [entry for entry in shuffled(chooser, entries) if entry.how in ("new", "as new")]
        cached = [entry for entry in shuffled(chooser, entries) if entry.how not in ("new", "as new")]
        counts = {entry.req_id: entry.count for entry in shuffled(chooser, entries)}
        finished = set(self._books.unsaid)
        if chooser.random() < 0.1:
            finished.add("never seen")
        for entry in entries:
            self._happened["id used again at once"] += entry.req_id in finished
        self._happened["several at once"] += len(entries) > 1
        return SchedulerOutput(
            scheduled_new_reqs=[_new(chooser, entry) for entry in as_new],
            scheduled_cached_reqs=_cached(chooser, cached),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            finished_req_ids=finished,
            preempted_req_ids={ticket.wish.req_id for ticket in preempted} or chooser.choice([None, frozenset()]),
        )


def _fits(ticket: Ticket, only: str) -> bool:
    if only == "decode":
        return ticket.status == "running" and ticket.left == 1
    return ticket.status == "preempted" if only == "resume" else True


def _new(chooser: random.Random, entry: Entry) -> NewRequestData:
    wish, tokens = entry.ticket.wish, entry.ticket.tokens[: entry.known]
    return NewRequestData(
        req_id=wish.req_id,
        prompt_token_ids=wish.prompt,
        block_ids=[list(ids) for ids in entry.blocks],
        num_computed_tokens=entry.start,
        sampling_params=wish.params,
        prefill_token_ids=tokens if entry.how == "as new" or chooser.random() < 0.2 else None,
    )


def _cached(chooser: random.Random, entries: Sequence[Entry]) -> CachedRequestData:
    resumed = {entry.req_id for entry in entries if entry.how != "continued"}
    told = {entry.req_id for entry in entries if entry.how == "with all_token_ids"}
    told |= {entry.req_id for entry in entries if _may_repeat(chooser, entry)}
    counts_outputs = chooser.random() < 0.8 or any(entry.known < len(entry.ticket.tokens) for entry in entries)
    repeats = [entry.how == "continued" and _may_repeat(chooser, entry) for entry in entries]
    return CachedRequestData(
        req_ids=[entry.req_id for entry in entries],
        resumed_req_ids=resumed,
        new_token_ids=[
            entry.ticket.tokens[entry.start : entry.known] if repeat else []
            for entry, repeat in zip(entries, repeats, strict=True)
        ]
        if any(repeats)
        else (),
        all_token_ids={
            entry.req_id: entry.ticket.tokens[: entry.known]
            for entry in shuffled(chooser, entries)
            if entry.req_id in told
        },
        new_block_ids=[
            [list(ids) for ids in entry.blocks]
            if entry.how != "continued" or any(entry.blocks) or chooser.random() < 0.3
            else None
            for entry in entries
        ],
        num_computed_tokens=[entry.start for entry in entries],
        num_output_tokens=[entry.known - len(entry.ticket.wish.prompt) for entry in entries] if counts_outputs else (),
    )


def _may_repeat(chooser: random.Random, entry: Entry) -> bool:
    """Whether a scheduler that knows a continued request's tokens says them again, which changes nothing."""
    return entry.how == "continued" and entry.ticket.is_settled and chooser.random() < 0.05


def shuffled(chooser: random.Random, values: Iterable[T]) -> list[T]:
    """The values in random order."""
    result = list(values)
    chooser.shuffle(result)
    return result
