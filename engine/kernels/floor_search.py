"""The largest value of a row for which the tokens at or above it weigh enough: what top_k and top_p come to.

For top_k every token weighs 1, for top_p its probability. What the chunks of a row hold proves a bound below the value,
which mostly leaves a few chunks; their tokens are looked at in registers, and the value is found by bisection over
ordered keys. Where the bound leaves many, as in flat distributions, the weights above a few pivots are summed until few
enough tokens lie between two of them. Probabilities are summed in fixed point, which no order changes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .logits_rows import MINUS_INF, NOT_THERE, list_chunks, ordered, scaled, value_of

ONE = tl.constexpr(2.0**43)
"""Probability 1 in fixed point: up to 2**20 tokens add up within 64 bits."""

MARGIN = tl.constexpr(1e-4)
"""How much more a chunk's float32 mass must prove: above what its rounding can amount to."""

COARSE = tl.constexpr(1 << 14)
"""How close bounds from chunks come, in keys: a few thousandths of the value."""


@triton.jit
def _likelihoods(keys):
    """Probabilities over that of the likeliest token, float32; 0 outside the row."""
    return tl.exp(value_of(tl.maximum(keys, MINUS_INF)))


@triton.jit
def _weights(keys, is_mass):
    """What tokens count for, int64: their likelihoods in fixed point, or 1."""
    weights = tl.full(keys.shape, 1, tl.int64)
    if is_mass:
        weights = (_likelihoods(keys) * ONE).to(tl.int64)
    return weights


@triton.jit
def _sums_from(keys, weights, least, LANES: tl.constexpr):
    """The weight of keys at or above ``least``, in ``[LANES, CHUNK // 4]`` parts that threads add up on their own.

    What lies outside the row has a key below all.
    """
    counted = tl.where(keys >= least.to(tl.int32), weights, 0)
    parts = tl.reshape(counted, [keys.shape[0] // LANES, LANES, keys.shape[1] // 4, 4])
    return tl.sum(tl.sum(parts, axis=3), axis=0)


@triton.jit
def _load_chunks(
    start, ids_ptr, first, num_listed, peak, temperature, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Keys of the scaled logits of the listed chunks from ``first`` on, ``[CHUNKS, CHUNK]``."""
    places = first + tl.arange(0, CHUNKS)
    ids = tl.load(ids_ptr + places, mask=places < num_listed, other=0)
    tokens = ids[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = (places < num_listed)[:, None] & (tokens < VOCAB)
    logits = tl.load(start + tokens, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where(inside, ordered(scaled(logits, peak, temperature)), NOT_THERE)


@triton.jit
def _load_written(values_ptr, first, size, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Keys that were written down, from ``first`` on, ``[CHUNKS, CHUNK]``."""
    places = first + tl.arange(0, CHUNKS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return tl.load(values_ptr + places, mask=places < size, other=NOT_THERE)


@triton.jit
def _write(values_ptr, keys, low, high, num_written, CAPACITY: tl.constexpr):
    """Write down the keys of [low, high) behind those written before; how many there are now."""
    keep = ((keys >= low.to(tl.int32)) & (keys < high.to(tl.int32))).to(tl.int32)
    in_chunk = tl.cumsum(keep, axis=1)
    num_kept = tl.sum(keep, axis=1)
    before = tl.cumsum(num_kept, axis=0) - num_kept
    places = num_written + before[:, None] + in_chunk - 1
    tl.debug_barrier()  # the block was read: what is written may lie in it
    tl.store(values_ptr + places, keys, mask=(keep > 0) & (places < CAPACITY))
    return num_written + tl.sum(num_kept)


@triton.jit
def _bound(keys, tops, masses, low, high, goal, is_mass, BELOW: tl.constexpr, CHUNK: tl.constexpr):
    """A key at or below (``BELOW``), or above, the largest whose tokens and those above weigh ``goal``; out of chunks.

    Of a chunk whose maximum reaches ``v``, all but one token may be below it, but then each weighs less than ``v``.
    """
    while high - low > COARSE:
        middle = low + (high - low) // 2
        weight = 1.0
        if is_mass:
            weight = _likelihoods(middle.to(tl.int32))
        certain = masses
        if BELOW:
            certain = tl.maximum(tops, masses - (CHUNK - 1) * weight)
        is_reached = tl.sum(tl.where(keys >= middle.to(tl.int32), certain, 0.0)) >= goal
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low if BELOW else high


@triton.jit
def search(
    start,
    ids_ptr,
    values_ptr,
    chunk_keys,
    masses,
    low,
    high,
    target,
    peak,
    temperature,
    is_mass,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    NUM: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The largest key of [low, high) whose tokens and those above weigh ``target``; ``low`` if none does.

    The tokens looked at are those of the listed chunks, or those between two pivots that were written down; ``beyond``
    is the weight of those above the latter.
    """
    BLOCK: tl.constexpr = CHUNKS * CHUNK
    tops = tl.where(is_mass, _likelihoods(chunk_keys), 1.0)
    masses = tl.where(is_mass, masses, CHUNK)
    goal = target.to(tl.float32) * tl.where(is_mass, 1 / ONE, 1.0)
    margin = tl.where(is_mass, MARGIN, 0.0)
    if NUM > CHUNKS:  # all are looked at where they fit
        low = _bound(chunk_keys, tops, masses, low, high, goal * (1 + margin), is_mass, True, CHUNK)
    # Chunks that end at ``low`` itself, as all do whose tokens are forbidden, say nothing about what is above it.
    num_listed = list_chunks(chunk_keys > low.to(tl.int32), ids_ptr, NUM)
    size = num_listed * CHUNK
    if size > BLOCK:
        high = _bound(chunk_keys, tops, masses, low, high, goal * (1 - margin), is_mass, False, CHUNK)
    is_written = tl.full((), 0, tl.int32)
    is_writing = size <= CAPACITY
    beyond = tl.full((), 0, tl.int64)
    while (high - low > 1) & (size > BLOCK):
        # Pivots are even steps, and the largest key below ``high``: many equal logits are often the likeliest ones.
        step = (high - low + 3) // 4
        second, third = tl.minimum(low + 2 * step, high - 1), tl.minimum(low + 3 * step, high - 1)
        first_sums = tl.zeros([LANES, CHUNK // 4], tl.int64)
        second_sums, third_sums, top_sums, above_sums = first_sums, first_sums, first_sums, first_sums
        num_written = tl.full((), 0, tl.int32)
        for place in range(0, size, BLOCK):
            if is_written > 0:
                keys = _load_written(values_ptr, place, size, CHUNK, CHUNKS)
            else:
                keys = _load_chunks(start, ids_ptr, place // CHUNK, num_listed, peak, temperature, VOCAB, CHUNK, CHUNKS)
            weights = _weights(keys, is_mass)
            first_sums += _sums_from(keys, weights, low + step, LANES)
            second_sums += _sums_from(keys, weights, second, LANES)
            third_sums += _sums_from(keys, weights, third, LANES)
            top_sums += _sums_from(keys, weights, high - 1, LANES)
            above_sums += _sums_from(keys, weights, high, LANES)
            if is_writing & (num_written <= CAPACITY):
                num_written = _write(values_ptr, keys, low, high, num_written, CAPACITY)
        tl.debug_barrier()
        if is_writing & (num_written <= CAPACITY):
            is_written = tl.full((), 1, tl.int32)
            size = num_written
        is_writing = high > low
        outside = beyond
        if is_written > 0:
            beyond += tl.sum(above_sums)
        if outside + tl.sum(top_sums) >= target:
            low = high - 1
        elif outside + tl.sum(third_sums) >= target:
            low, high = third, high - 1
        elif outside + tl.sum(second_sums) >= target:
            low, high = second, third
        elif outside + tl.sum(first_sums) >= target:
            low, high = low + step, second
        else:
            high = low + step
    if high - low > 1:
        if is_written > 0:
            keys = _load_written(values_ptr, 0, size, CHUNK, CHUNKS)
        else:
            keys = _load_chunks(start, ids_ptr, 0, num_listed, peak, temperature, VOCAB, CHUNK, CHUNKS)
        weights = _weights(keys, is_mass)
        while high - low > 1:
            middle = low + (high - low) // 2
            is_reached = beyond + tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0)) >= target
            low = tl.where(is_reached, middle, low)
            high = tl.where(is_reached, high, middle)
    return low


@triton.jit
def mass_from(
    start,
    ids_ptr,
    chunk_keys,
    least,
    peak,
    temperature,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    NUM: tl.constexpr,
):
    """The probability of tokens at or above ``least``, in fixed point."""
    num_listed = list_chunks(chunk_keys >= least.to(tl.int32), ids_ptr, NUM)
    total = tl.full((), 0, tl.int64)
    for first in range(0, num_listed, CHUNKS):
        keys = _load_chunks(start, ids_ptr, first, num_listed, peak, temperature, VOCAB, CHUNK, CHUNKS)
        total += tl.sum(tl.where(keys >= least.to(tl.int32), _weights(keys, True), 0))
    return total
