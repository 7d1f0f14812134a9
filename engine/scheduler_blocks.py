"""Block tables of requests: what they share, what they need, what may be published."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

from .block_pool import BlockPool, chain_hash, root_hash
from .scheduler_request import Request


@frozen
class CachedPrefix:
    """Blocks, a list for each KV-cache group, that already hold the first ``num_tokens`` tokens of a request.

    ``num_queried`` is how many tokens were looked up: all that are known, or none where the cache is not read.
    """

    blocks: tuple[list[int], ...]
    num_tokens: int
    num_queried: int


class BlockTables:
    """Gives the requests of a scheduler their blocks, for one or several KV-cache groups over one pool."""

    def __init__(self, pool: BlockPool, block_sizes: Sequence[int]) -> None:
        self.pool = pool
        self.block_sizes = tuple(block_sizes)
        self.smallest_step = math.gcd(*self.block_sizes)
        """A block of some group is filled only where the token count passes a multiple of this."""
        # A prefix is usable where it ends on a block border in every group.
        self._alignment = math.lcm(*self.block_sizes)

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks, over all groups, hold this many tokens of one request."""
        return sum(-(-num_tokens // size) for size in self.block_sizes)

    def find_prefix(self, request: Request) -> CachedPrefix:
        """The longest cached prefix that leaves the last known token to compute: its logits are sampled from."""
        if not (self.pool.enable_caching and request.reads_prefix_cache):
            return CachedPrefix(tuple([] for _ in self.block_sizes), 0, 0)
        num_tokens = (len(request.token_ids) - 1) // self._alignment * self._alignment
        found: list[list[int]] = []
        for group, size in enumerate(self.block_sizes):
            blocks: list[int] = []
            for block_hash in self._hashes(request, group, num_tokens)[: num_tokens // size]:
                block = self.pool.lookup(block_hash)
                if block is None:
                    break
                blocks.append(block)
            num_tokens = min(num_tokens, len(blocks) * size // self._alignment * self._alignment)
            found.append(blocks)
        usable = tuple(ids[: num_tokens // size] for ids, size in zip(found, self.block_sizes, strict=True))
        return CachedPrefix(usable, num_tokens, len(request.token_ids))

    def admit(self, request: Request, prefix: CachedPrefix, num_tokens: int) -> bool:
        """Give a request without blocks its cached prefix, and fresh blocks up to ``num_tokens``.

        False (and nothing changed) unless all of its known tokens would find room now: a part of a prompt that has to
        give way before the rest was computed is work lost.
        """
        reuse = [block for ids in prefix.blocks for block in ids]
        num_revived = sum(1 for block in reuse if self.pool.ref_count(block) == 0)
        if self.num_blocks(len(request.token_ids)) - len(reuse) + num_revived > self.pool.num_free:
            return False
        fresh = self.pool.allocate(self.num_blocks(num_tokens) - len(reuse), reuse)
        if fresh is None:
            return False
        request.block_ids = tuple(list(ids) for ids in prefix.blocks)
        self._append(request, fresh, num_tokens)
        return True

    def grow(self, request: Request, num_tokens: int) -> tuple[list[int], ...] | None:
        """Append the blocks that are missing for ``num_tokens``; None (and nothing changed) when too few are free."""
        held = sum(len(ids) for ids in request.block_ids)
        fresh = self.pool.allocate(self.num_blocks(num_tokens) - held)
        return None if fresh is None else self._append(request, fresh, num_tokens)

    def shrink(self, request: Request, appended: Sequence[Sequence[int]]) -> None:
        """Cut the blocks that :meth:`grow` appended off a table; the pool's own rollback has taken them back."""
        for ids, new in zip(request.block_ids, appended, strict=True):
            del ids[len(ids) - len(new) :]
        self._measure(request)

    def detach(self, request: Request) -> tuple[list[int], ...]:
        """Empty a request's table without freeing its blocks; returns what it held."""
        block_ids, request.block_ids, request.num_slots = request.block_ids, (), 0
        return block_ids

    def attach(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """Give a request back the table that :meth:`detach` took."""
        request.block_ids = block_ids
        self._measure(request)

    def release(self, request: Request) -> tuple[list[int], ...]:
        """Free all blocks of a request, if it has any; returns what it held."""
        block_ids = self.detach(request)
        for ids in block_ids:
            self.pool.free(ids)
        return block_ids

    def publish(self, request: Request, start: int, end: int) -> None:
        """Let others find the blocks that were filled while the written tokens went from ``start`` to ``end``."""
        if not self.pool.enable_caching:
            return
        for group, size in enumerate(self.block_sizes):
            first, last = start // size, end // size
            if first < last:
                hashes = self._hashes(request, group, end)
                for index in range(first, last):
                    self.pool.publish(request.block_ids[group][index], hashes[index])

    def forget(self, request: Request) -> None:
        """Let nobody find the blocks of a request whose computation went wrong."""
        for ids in request.block_ids:
            for block in ids:
                self.pool.forget(block)

    def num_common_prefix_blocks(self, running: Sequence[Request], num_leaving: int) -> list[int]:
        """How many leading blocks all running requests share, for each group; 0 when there is only one request.

        Only published blocks are ever shared, so each of them is full and its keys and values are written. Besides
        running requests only ``num_leaving`` others hold blocks, so a block with as many references as there are of
        both is in every table.
        """
        counts = [0] * len(self.block_sizes)
        if len(running) < 2:
            return counts
        for group, ids in enumerate(running[0].block_ids):
            for block in ids:
                if self.pool.ref_count(block) != len(running) + num_leaving:
                    break
                counts[group] += 1
        return counts

    def _append(self, request: Request, fresh: list[int], num_tokens: int) -> tuple[list[int], ...]:
        appended: list[list[int]] = []
        offset = 0
        for ids, size in zip(request.block_ids, self.block_sizes, strict=True):
            count = -(-num_tokens // size) - len(ids)
            appended.append(fresh[offset : offset + count])
            ids.extend(appended[-1])
            offset += count
        self._measure(request)
        return tuple(appended)

    def _measure(self, request: Request) -> None:
        request.num_slots = min(len(ids) * size for ids, size in zip(request.block_ids, self.block_sizes, strict=True))

    def _hashes(self, request: Request, group: int, num_tokens: int) -> list[bytes]:
        """Hashes of a group's blocks, at least those that lie in the first ``num_tokens``; computed once each."""
        if not request.block_hashes:
            request.block_hashes = tuple([] for _ in self.block_sizes)
        hashes, size = request.block_hashes[group], self.block_sizes[group]
        for index in range(len(hashes), num_tokens // size):
            parent = hashes[-1] if hashes else root_hash(group, size, request.cache_salt)
            hashes.append(chain_hash(parent, request.token_ids[index * size : (index + 1) * size]))
        return hashes
