"""The books of a scheduler in the hands of a test: requests, blocks with their holders, and steps in flight.

They change only when a step was sampled, so that a step which failed, was refused or was undone leaves no trace here,
and the runner can be held to them.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from attrs import define, field, frozen
from driver import PENDING, Served, Wish
from twostroke.stages.io import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput

MAX_DONORS = 5


@define(eq=False)
class Ticket:
    """A request: what was asked, what it must get, and how far it is.

    ``awaited`` says for each token on its way which part of which step brings it.
    """

    wish: Wish
    expected: Served
    tokens: list[int]
    computed: int = 0
    last_start: int = 0
    blocks: list[list[int]] = field(factory=list)
    status: str = "new"
    awaited: dict[int, Entry] = field(factory=dict)
    is_spoilt: bool = False
    num_scored: int = 0
    is_table_due: bool = True

    @property
    def num_outputs(self) -> int:
        """Sampled tokens, those on their way included."""
        return len(self.tokens) - len(self.wish.prompt)

    @property
    def left(self) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def is_complete(self) -> bool:
        """Whether everything that it wants was sampled."""
        return self.num_outputs >= self.wish.max_tokens

    @property
    def is_settled(self) -> bool:
        """Whether every token has arrived."""
        return not self.awaited

    @property
    def wants_table(self) -> bool:
        """Whether log probabilities of its prompt are still to be computed."""
        return self.wish.params.prompt_logprobs is not None and self.num_scored < len(self.wish.prompt) - 1

    @property
    def truth(self) -> list[int]:
        """Its tokens with those filled in that are on their way."""
        return [*self.wish.prompt, *self.expected.tokens[: self.num_outputs]]


@frozen(eq=False)
class Entry:
    """One request's part of a step: ``count`` tokens from ``start`` on. Fewer ``known`` tokens than before: a rewind.

    ``blocks`` are all of its blocks where it gets a fresh row (``how`` is not "continued"), else the added ones.
    """

    ticket: Ticket
    how: str
    start: int
    count: int
    known: int
    blocks: list[list[int]]

    @property
    def req_id(self) -> str:
        """The request's id."""
        return self.ticket.wish.req_id

    @property
    def samples(self) -> bool:
        """Whether its last known token is computed."""
        return self.start + self.count == self.known


@frozen(eq=False)
class Plan:
    """A step that may be executed, and what it will change in the books."""

    entries: tuple[Entry, ...]
    preempted: tuple[Ticket, ...]
    output: SchedulerOutput

    def part(self, req_ids: Iterable[str], *, is_first: bool) -> Plan:
        """The part for some of its requests."""
        kept = set(req_ids)
        return Plan(
            tuple(entry for entry in self.entries if entry.req_id in kept),
            self.preempted if is_first else (),
            self.output.restricted_to(kept, is_first=is_first),
        )


@define(eq=False)
class Flight:
    """A launched step: its output, the requests whose tables it completes or whose logits were spoilt, freed blocks."""

    plan: Plan
    late: ModelRunnerOutput | AsyncModelRunnerOutput
    completes: frozenset[str]
    spoilt: frozenset[str]
    freed: list[int] = field(factory=list)


class Blocks:
    """A shuffled pool of blocks that several requests may hold."""

    def __init__(self, num_blocks: int, chooser: random.Random, on_free: Callable[[list[int]], None]) -> None:
        self.free = list(range(1, num_blocks))
        chooser.shuffle(self.free)
        self.holders: Counter[int] = Counter()
        self._on_free = on_free

    def take(self, count: int) -> list[int]:
        """Blocks that nobody holds."""
        taken = [self.free.pop() for _ in range(count)]
        self.holders.update(taken)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each."""
        self.holders.update(blocks)

    def release(self, blocks: Iterable[int]) -> list[int]:
        """One holder less for each; those that nobody holds any more, for :meth:`give_back`."""
        idle: list[int] = []
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                idle.append(block)
        return idle

    def give_back(self, blocks: list[int]) -> None:
        """These can be taken again: no step in flight uses them."""
        self._on_free(blocks)
        self.free.extend(blocks)


class Books:
    """What a scheduler knows. ``unsaid`` are finished ids that the runner was not told of."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.tickets: dict[str, Ticket] = {}
        self.unsaid: set[str] = set()
        self.donors: deque[tuple[list[int], list[list[int]]]] = deque()
        self.in_flight: deque[Flight] = deque()
        self.num_checked = 0

    @property
    def running(self) -> list[Ticket]:
        """Requests with a row."""
        return [ticket for ticket in self.tickets.values() if ticket.status == "running"]

    def drop(self, ticket: Ticket) -> None:
        """A request has ended; the runner is told with the next step."""
        del self.tickets[ticket.wish.req_id]
        self._retire(ticket)
        if ticket.status != "new":
            self.unsaid.add(ticket.wish.req_id)

    def preempt(self, ticket: Ticket) -> None:
        """A request has lost its row and its blocks."""
        self._retire(ticket)
        ticket.status, ticket.computed = "preempted", 0

    def _retire(self, ticket: Ticket) -> None:
        """Keep the blocks of computed tokens for prefix hits, for a while."""
        blocks, ticket.blocks = ticket.blocks, []
        if ticket.is_spoilt or not blocks:
            self._free(block for ids in blocks for block in ids)
            return
        self.donors.append((ticket.truth[: ticket.computed], blocks))
        if len(self.donors) > MAX_DONORS:
            self._free(block for ids in self.donors.popleft()[1] for block in ids)

    def forget_donors(self) -> None:
        """Give up all blocks that are kept for prefix hits."""
        while self.donors:
            self._free(block for ids in self.donors.popleft()[1] for block in ids)

    def _free(self, blocks: Iterable[int]) -> None:
        idle = self.blocks.release(blocks)
        if self.in_flight:
            self.in_flight[-1].freed += idle
        else:
            self.blocks.give_back(idle)

    def cancel(self, plan: Plan) -> None:
        """A plan will not be executed."""
        for entry in plan.entries:
            self._free(block for ids in entry.blocks for block in ids)

    def book(
        self, plan: Plan, late: ModelRunnerOutput | AsyncModelRunnerOutput | None, spoilt: frozenset[str] = frozenset()
    ) -> None:
        """A plan was executed; ``late`` is None if it computed nothing."""
        self.unsaid -= plan.output.finished_req_ids
        completes = {entry.req_id for entry in plan.entries if _advance_table(entry)}
        if late is not None:
            self.in_flight.append(Flight(plan, late, frozenset(completes), spoilt))
        for ticket in plan.preempted:
            if ticket.wish.req_id in self.tickets:
                self.preempt(ticket)
        for entry in plan.entries:
            ticket = entry.ticket
            if self.tickets.get(entry.req_id) is not ticket:  # it was aborted while the step was open
                self._free(block for ids in entry.blocks for block in ids)
                self.unsaid.add(entry.req_id)
                continue
            if entry.how == "continued":
                for held, added in zip(ticket.blocks, entry.blocks, strict=True):
                    held += added
            else:
                ticket.blocks = [list(ids) for ids in entry.blocks]
            ticket.status, ticket.last_start = "running", entry.start
            ticket.computed = entry.start + entry.count
            del ticket.tokens[entry.known :]
            ticket.awaited = {position: other for position, other in ticket.awaited.items() if position < entry.known}
            ticket.is_spoilt |= entry.req_id in spoilt
            if entry.samples:
                ticket.tokens.append(PENDING)
                ticket.awaited[entry.known] = entry

    def land(self) -> list[Ticket]:
        """Wait for the oldest step in flight and check what it brought; gives the requests that it failed."""
        flight = self.in_flight[0]
        result = flight.late.get_output()
        self.in_flight.popleft()
        assert set(result.req_ids) == {entry.req_id for entry in flight.plan.entries}
        assert set(result.prompt_logprobs_dict) == flight.completes
        assert result.request_errors.keys() == flight.spoilt
        assert len(result.req_ids) == len(result.req_id_to_index) == len(result.sampled_token_ids)
        for entry in flight.plan.entries:
            index = result.req_id_to_index[entry.req_id]
            sampled = result.sampled_token_ids[index]
            if entry.ticket.is_spoilt:
                assert not (sampled and entry.req_id in flight.spoilt)
                continue
            assert len(sampled) == entry.samples, f"{entry.req_id} sampled {sampled}"
            if entry.samples:
                self._check_token(entry, sampled[0], result, index)
        for req_id in flight.completes:
            ticket = next(entry.ticket for entry in flight.plan.entries if entry.req_id == req_id)
            _check_rows(result.prompt_logprobs_dict[req_id], ticket.expected.prompt_logprobs)
        self.blocks.give_back(flight.freed)
        tickets = [entry.ticket for entry in flight.plan.entries if entry.req_id in flight.spoilt]
        return [ticket for ticket in tickets if self.tickets.get(ticket.wish.req_id) is ticket]

    def _check_token(self, entry: Entry, token: int, result: ModelRunnerOutput, index: int) -> None:
        ticket, position = entry.ticket, entry.known
        output = position - len(ticket.wish.prompt)
        assert token == ticket.expected.tokens[output], f"{entry.req_id} got {token} as output {output}"
        if ticket.awaited.get(position) is entry:
            ticket.tokens[position] = token
            del ticket.awaited[position]
        if ticket.wish.params.logprobs is not None:
            assert result.logprobs is not None
            lists = result.logprobs.for_request(index)
            assert lists.logprob_token_ids[0, 0] == token
            np.testing.assert_allclose(lists.logprobs, ticket.expected.logprobs[output : output + 1], atol=1e-4)
        self.num_checked += 1


def _advance_table(entry: Entry) -> bool:
    """Count the prompt positions that a step scored; whether that completes the table."""
    ticket = entry.ticket
    if ticket.wish.params.prompt_logprobs is None:
        return False
    last = len(ticket.wish.prompt) - 1
    ticket.num_scored = max(ticket.num_scored, min(entry.start + entry.count, last))
    completes = ticket.is_table_due and ticket.num_scored == last
    ticket.is_table_due &= not completes
    return completes


def _check_rows(got: object, expected: Sequence[float] | np.ndarray | None) -> None:
    assert got is not None
    assert expected is not None
    np.testing.assert_allclose(got.logprobs, expected, atol=1e-4)  # pyright: ignore[reportAttributeAccessIssue]
