"""Blocks of the KV cache: reference counts, the free list, and which blocks hold a known prefix.

Prefix caching by chained block hashes with least-recently-used eviction follows vLLM's automatic prefix caching; the
block table itself is PagedAttention (Kwon et al., 2023, arXiv:2309.06180).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from attrs import define, field, frozen

from ..stages.specs import NULL_BLOCK


def root_hash(group: int, block_size: int, salt: str = "") -> bytes:
    """What the first block of a request is chained to.

    Blocks are shared only within one KV-cache ``group`` and one ``salt`` (a LoRA id, a tenant: whatever makes equal
    tokens give different keys and values).
    """
    return sha256(f"{group}/{block_size}/{salt}".encode("utf-8", "surrogatepass")).digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block: its own tokens and, through ``parent``, every token before them.

    A cryptographic digest, so that equal names mean equal tokens and no second comparison is needed.
    """
    digest = sha256(parent)
    digest.update(array("q", token_ids))
    return digest.digest()


@frozen
class _Change:
    """One block taken or released; enough to undo it.

    ``predecessor`` was its neighbour in the free list, None if it was not free; ``evicted`` the prefix that it held.
    """

    block: int
    taken: bool
    predecessor: int | None = None
    evicted: bytes | None = None


@define(eq=False)
class PoolJournal:
    """What one step took from a pool and released to it, in order."""

    changes: list[_Change] = field(factory=list)


class BlockPool:
    """The blocks of all KV-cache groups, as ids ``1 .. num_blocks - 1``; block 0 is the null block, never handed out.

    A block whose reference count falls to zero goes to the free list. One that holds a published prefix goes to its
    end and can be found and taken again until it is the least recently freed one and gets evicted; the others go to
    its front. Every operation is O(1) a block.

    Between :meth:`begin` and :meth:`end` the pool keeps a journal, so that a step that was scheduled but never ran can
    be undone exactly, down to the order of eviction. Journals are undone in reverse order; blocks may be released and
    published between a journal's end and its undoing, but not taken.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.num_free = num_blocks - 1
        self._ref_counts = [0] * num_blocks
        # The free list is circular; the null block, which is never free, is its sentinel.
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._journal: PoolJournal | None = None

    @property
    def num_cached(self) -> int:
        """How many blocks hold a published prefix."""
        return len(self._block_of)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def ref_count(self, block: int) -> int:
        """How many requests hold a block."""
        return self._ref_counts[block]

    def is_cached(self, block: int) -> bool:
        """Whether a block holds a published prefix."""
        return self._hash_of[block] is not None

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this prefix, held by requests or free, or None."""
        return self._block_of.get(block_hash)

    def allocate(self, count: int, reuse: Sequence[int] = ()) -> list[int] | None:
        """Take ``count`` blocks from the front of the free list, and one more reference to each block of ``reuse``.

        Returns the ``count`` fresh blocks, or None (and nothing changed) when too few are free.
        """
        ref_counts = self._ref_counts
        num_revived = sum(1 for block in reuse if ref_counts[block] == 0)
        if count + num_revived > self.num_free:
            return None
        for block in reuse:
            self._take(block)
        return [self._take_oldest() for _ in range(count)]

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a request's table. Its tail becomes the first to be evicted."""
        for block in reversed(blocks):
            self._release(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let others find a full block whose keys and values have been written.

        Of two blocks with equal content the first one published stays the one that is found.
        """
        if self.enable_caching and block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, block: int) -> None:
        """Withdraw what :meth:`publish` said about a block; those who hold it keep it."""
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None

    def forget_all(self) -> None:
        """Withdraw every published prefix (the weights or the cache's memory changed)."""
        for block in list(self._block_of.values()):
            self.forget(block)

    def begin(self) -> PoolJournal:
        """Start a journal: everything taken and released until :meth:`end` can be undone with it."""
        assert self._journal is None, "a journal is open already; end it first"
        self._journal = PoolJournal()
        return self._journal

    def end(self) -> None:
        """Stop writing the journal."""
        self._journal = None

    def rollback(self, journal: PoolJournal, *, written: bool = False) -> None:
        """Undo what a journal holds, the newest change first.

        ``written``: the blocks that were taken may have been written to, so the prefixes that they held stay evicted.
        """
        self.end()
        for change in reversed(journal.changes):
            block = change.block
            if change.taken:
                self._drop_reference(block, change.predecessor)
                if change.evicted is not None and not written:
                    self.publish(block, change.evicted)
            else:
                if self._ref_counts[block] == 0:
                    self._unlink(block)
                self._ref_counts[block] += 1

    def _take_oldest(self) -> int:
        block = self._next[NULL_BLOCK]
        evicted = self._hash_of[block]
        self.forget(block)
        self._take(block, evicted)
        return block

    def _take(self, block: int, evicted: bytes | None = None) -> None:
        is_free = self._ref_counts[block] == 0
        if self._journal is not None:
            self._journal.changes.append(_Change(block, True, self._previous[block] if is_free else None, evicted))
        if is_free:
            self._unlink(block)
        self._ref_counts[block] += 1

    def _release(self, block: int) -> None:
        assert self._ref_counts[block] > 0, f"block {block} was freed more often than it was taken"
        if self._journal is not None:
            self._journal.changes.append(_Change(block, False))
        self._drop_reference(block)

    def _drop_reference(self, block: int, predecessor: int | None = None) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if predecessor is None:
                # A block without a published prefix is of no use to anybody: reuse it first.
                predecessor = self._previous[NULL_BLOCK] if self._hash_of[block] is not None else NULL_BLOCK
            self._link(block, predecessor)

    def _link(self, block: int, predecessor: int) -> None:
        successor = self._next[predecessor]
        self._previous[block], self._next[block] = predecessor, successor
        self._next[predecessor] = self._previous[successor] = block
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        predecessor, successor = self._previous[block], self._next[block]
        self._next[predecessor], self._previous[successor] = successor, predecessor
        self.num_free -= 1
