"""The block pool: references, eviction order, published prefixes, undo."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twostroke.engine.block_pool import BlockPool, PoolJournal, chain_hash, root_hash


def take_all(pool: BlockPool) -> list[int]:
    blocks = pool.allocate(pool.num_free)
    assert blocks is not None
    return blocks


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert sorted(take_all(pool)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.usage == 1.0


def test_too_few_free_blocks_give_none_and_change_nothing():
    pool = BlockPool(4)
    held = pool.allocate(2)
    assert held is not None
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert [pool.ref_count(block) for block in held] == [1, 1]


def test_a_block_is_free_when_its_last_reference_goes():
    pool = BlockPool(3)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"a")
    assert pool.allocate(0, [block]) == []
    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2
    assert pool.lookup(b"a") == block


def test_freeing_a_free_block_is_an_internal_error():
    pool = BlockPool(3)
    (block,) = pool.allocate(1) or []
    pool.free([block])
    with pytest.raises(AssertionError, match=f"block {block} was freed more often"):
        pool.free([block])


def test_eviction_takes_unpublished_blocks_then_the_least_recently_freed_tail_first():
    pool = BlockPool(6)
    first, second = pool.allocate(2) or [], pool.allocate(2) or []
    for name, block in zip((b"a0", b"a1", b"b0", b"b1"), [*first, *second], strict=True):
        pool.publish(block, name)
    pool.free(first)
    pool.free(second)
    unpublished = ({1, 2, 3, 4, 5} - {*first, *second}).pop()
    assert [pool.allocate(1) for _ in range(5)] == [[unpublished], [first[1]], [first[0]], [second[1]], [second[0]]]
    assert pool.num_cached == 0
    assert all(pool.lookup(name) is None for name in (b"a0", b"a1", b"b0", b"b1"))


def test_reuse_of_free_cached_blocks_counts_against_the_free_ones():
    pool = BlockPool(4)
    blocks = pool.allocate(3) or []
    for index, block in enumerate(blocks):
        pool.publish(block, bytes([index]))
    pool.free(blocks)
    assert pool.allocate(2, blocks[:2]) is None
    assert pool.num_free == 3
    assert pool.allocate(1, blocks[:2]) == [blocks[2]]


def test_a_taken_block_keeps_its_place_in_the_cache_and_loses_its_turn_to_be_evicted():
    pool = BlockPool(4)
    blocks = pool.allocate(3) or []
    for index, block in enumerate(blocks):
        pool.publish(block, bytes([index]))
    pool.free(blocks)
    assert pool.allocate(0, [blocks[2]]) == []
    pool.free([blocks[2]])
    assert [pool.allocate(1) for _ in range(3)] == [[blocks[1]], [blocks[0]], [blocks[2]]]


def test_the_first_of_two_equal_blocks_is_the_one_that_is_found():
    pool = BlockPool(4)
    first, second = pool.allocate(2) or []
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.lookup(b"a") == first
    assert not pool.is_cached(second)


def test_nothing_is_published_without_caching():
    pool = BlockPool(3, enable_caching=False)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"a")
    assert pool.lookup(b"a") is None


def test_forget_all_leaves_holders_their_blocks():
    pool = BlockPool(4)
    held, freed = pool.allocate(2) or []
    pool.publish(held, b"a")
    pool.publish(freed, b"b")
    pool.free([freed])
    pool.forget_all()
    assert pool.num_cached == 0
    assert pool.ref_count(held) == 1
    assert pool.num_free == 2


def test_hashes_depend_on_tokens_every_token_before_them_group_block_size_and_salt():
    root = root_hash(0, 2)
    names = {
        chain_hash(root, [1, 2]),
        chain_hash(root, [2, 1]),
        chain_hash(root, [1, 2, 0]),
        chain_hash(chain_hash(root, [1, 2]), [1, 2]),
        chain_hash(chain_hash(root, [3, 2]), [1, 2]),
        chain_hash(root_hash(1, 2), [1, 2]),
        chain_hash(root_hash(0, 4), [1, 2]),
        chain_hash(root_hash(0, 2, "adapter"), [1, 2]),
    }
    assert len(names) == 8
    assert chain_hash(root, [1, 2]) == chain_hash(root, (1, 2))


def test_rollback_brings_evicted_prefixes_back_in_their_order():
    pool = BlockPool(4)
    blocks = pool.allocate(3) or []
    for index, block in enumerate(blocks):
        pool.publish(block, bytes([index]))
    pool.free(blocks)
    journal = pool.begin()
    assert pool.allocate(2) == [blocks[2], blocks[1]]
    assert pool.num_cached == 1
    pool.rollback(journal)
    assert [pool.lookup(bytes([index])) for index in range(3)] == blocks
    assert [pool.allocate(1) for _ in range(3)] == [[blocks[2]], [blocks[1]], [blocks[0]]]


def test_rollback_of_blocks_that_were_written_to_does_not_bring_their_prefixes_back():
    pool = BlockPool(4)
    blocks = pool.allocate(3) or []
    for index, block in enumerate(blocks):
        pool.publish(block, bytes([index]))
    pool.free(blocks)
    journal = pool.begin()
    assert pool.allocate(1, blocks[:1]) == [blocks[2]]
    pool.rollback(journal, written=True)
    assert [pool.lookup(bytes([index])) for index in range(3)] == [*blocks[:2], None]
    assert pool.num_free == 3


def test_a_shared_block_that_its_holder_freed_meanwhile_is_free_after_rollback():
    pool = BlockPool(3)
    held = pool.allocate(1) or []
    pool.publish(held[0], b"a")
    journal = pool.begin()
    assert pool.allocate(0, held) == []
    pool.end()
    pool.free(held)
    assert pool.num_free == 1
    pool.rollback(journal)
    assert pool.num_free == 2
    assert pool.allocate(2) == [({1, 2} - {*held}).pop(), *held]


def picture(pool: BlockPool, names: list[bytes]) -> tuple[object, ...]:
    references = [pool.ref_count(block) for block in range(pool.num_blocks)]
    return pool.num_free, references, [pool.lookup(name) for name in names]


class History:
    """Random changes, the same ones in each pool."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.names: list[bytes] = []

    def change(self, pools: list[BlockPool], tables: list[list[int]], choices: Sequence[str]) -> None:
        choice = self.data.draw(st.sampled_from(choices))
        if choice == "free" and tables:
            table = tables.pop(self.data.draw(st.integers(0, len(tables) - 1)))
            for pool in pools:
                pool.free(table)
        elif choice == "publish" and tables:
            block = tables[self.data.draw(st.integers(0, len(tables) - 1))][0]
            self.names.append(len(self.names).to_bytes(2, "big"))
            for pool in pools:
                pool.publish(block, self.names[-1])
        elif choice == "take":
            found = [block for name in self.names if (block := pools[0].lookup(name)) is not None]
            reuse = self.data.draw(st.lists(st.sampled_from(found), unique=True, max_size=2)) if found else []
            count = self.data.draw(st.integers(0 if reuse else 1, 3))
            given_blocks = [pool.allocate(count, reuse) for pool in pools]
            assert all(blocks == given_blocks[0] for blocks in given_blocks)
            if given_blocks[0] is not None:
                tables.append([*reuse, *given_blocks[0]])

    def many(self, pools: list[BlockPool], tables: list[list[int]], *choices: str) -> None:
        for _ in range(self.data.draw(st.integers(0, 6))):
            self.change(pools, tables, choices)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_rollback_restores_references_cache_and_the_order_of_eviction(data: st.DataObject):
    """The same random history with and without two undone parts in the middle ends in the same pool."""
    plain, undone = BlockPool(6), BlockPool(6)
    held: list[list[int]] = []
    history = History(data)
    history.many([plain, undone], held, "take", "free", "publish")
    tables_inside = list(held)
    first = undone.begin()
    history.many([undone], tables_inside, "take", "free")
    undone.end()
    second = undone.begin()
    history.many([undone], tables_inside, "take", "free")
    undone.rollback(second)
    undone.rollback(first)
    assert picture(plain, history.names) == picture(undone, history.names)
    history.many([plain, undone], held, "take", "free", "publish")
    assert picture(plain, history.names) == picture(undone, history.names)
    assert take_all(plain) == take_all(undone)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_rollback_keeps_what_others_freed_and_published_meanwhile(data: st.DataObject):
    plain, undone = BlockPool(8), BlockPool(8)
    held: list[list[int]] = []
    history = History(data)
    history.many([plain, undone], held, "take", "publish")
    tables_inside, others = held[::2], held[1::2]
    journals: list[PoolJournal] = []
    for _ in range(2):
        journals.append(undone.begin())
        history.many([undone], tables_inside, "take", "free")
        undone.end()
        history.many([plain, undone], others, "free", "publish")
    for journal in reversed(journals):
        undone.rollback(journal)
    assert picture(plain, history.names) == picture(undone, history.names)
    assert sorted(take_all(plain)) == sorted(take_all(undone))
