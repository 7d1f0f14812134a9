"""Tiles of a batch that decodes, kept from step to step: each request gets one key more, nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from ...stages.attention import AttentionBatch
from ...stages.records import IntArray
from .tiles import MAX_TILE_KEYS, Tile, Tiling

# How much larger than MAX_TILE_KEYS a tile may grow before the batch is cut into tiles anew.
_MOST_KEYS = MAX_TILE_KEYS * 5 // 4

_ROOM = 16


@define(eq=False)
class _GrowingTile:
    """One tile, and room for the keys to come.

    ``requests`` are its batch indices, which are its tokens too. ``padding`` int64 ``[num_reqs]`` says how many keys
    each has less than the tile is wide. ``slots`` int64 ``[num_reqs, capacity]`` are those of the keys: beyond a
    request's own an older slot of its own. None where one request's keys are adjacent; they are ``run`` then.
    """

    tile: Tile
    requests: slice | IntArray
    padding: IntArray
    is_even: bool
    slots: IntArray | None
    run: slice

    @classmethod
    def of(cls, tile: Tile, seq_lens: IntArray) -> _GrowingTile:
        requests = tile.tokens if isinstance(tile.tokens, slice) else tile.tokens.numpy()
        padding = tile.num_keys - seq_lens[requests].astype(np.int64)
        is_even = not padding.any()
        if isinstance(tile.slots, slice):
            return cls(tile, requests, padding, is_even, None, tile.slots)
        slots = _with_room(tile.slots.numpy().reshape(tile.num_reqs, -1))
        return cls(tile, requests, padding, is_even, slots, slice(0))

    def grow(self, new_slots: IntArray) -> tuple[Tile, ...]:
        """The tile with one key more for each request; ``new_slots`` are those of the whole batch."""
        tile, new = self.tile, new_slots[self.requests]
        num_keys = tile.num_keys + 1
        if self.slots is None and new[0] == self.run.stop:
            self.run = slice(self.run.start, self.run.stop + 1)
            slots: slice | torch.Tensor = self.run
        else:
            slots = torch.from_numpy(self._append(new, num_keys))
        mask = tile.mask
        if not self.is_even:
            seen = np.arange(num_keys) < (num_keys - self.padding)[:, None]
            mask = torch.from_numpy(seen[:, None, None])
        self.tile = Tile(tile.num_reqs, 1, num_keys, tile.tokens, slots, mask, False)
        return (self.tile,)

    def _append(self, new: IntArray, num_keys: int) -> IntArray:
        slots = self.slots
        if slots is None:
            slots = np.arange(self.run.start, self.run.stop)[None]
        if num_keys > slots.shape[1]:
            slots = _with_room(slots)
        if self.is_even:
            slots[:, num_keys - 1] = new
        else:
            slots[np.arange(len(new)), num_keys - 1 - self.padding] = new
        self.slots = slots
        return slots[:, :num_keys].reshape(-1)


class _EvenTiles:
    """Tiles of one width without padding, which grow together: their slots lie in one array, tile after tile."""

    def __init__(self, parts: Sequence[_GrowingTile]) -> None:
        self._tiles = [part.tile for part in parts]
        self._num_keys = parts[0].tile.num_keys
        self._requests: IntArray = np.concatenate([_listed(part.requests) for part in parts])
        self._slots: IntArray = np.concatenate([part.slots for part in parts if part.slots is not None])
        self._sizes = [tile.num_reqs for tile in self._tiles]

    def grow(self, new_slots: IntArray) -> tuple[Tile, ...]:
        """The tiles with one key more for each request; ``new_slots`` are those of the whole batch."""
        self._num_keys = num_keys = self._num_keys + 1
        if num_keys > self._slots.shape[1]:
            self._slots = _with_room(self._slots)
        self._slots[:, num_keys - 1] = new_slots[self._requests]
        flat = torch.from_numpy(self._slots[:, :num_keys].reshape(-1))
        slots = flat.split([size * num_keys for size in self._sizes])
        return tuple(
            [
                Tile(tile.num_reqs, 1, num_keys, tile.tokens, part, None, False)
                for tile, part in zip(self._tiles, slots, strict=True)
            ]
        )


def _grouped(tiles: Sequence[_GrowingTile]) -> Iterator[tuple[tuple[int, ...], _GrowingTile | _EvenTiles]]:
    """What grows on its own or together, with the places of its tiles among ``tiles``."""
    by_width: dict[tuple[int, int], list[int]] = {}
    for place, part in enumerate(tiles):
        is_plain = part.is_even and part.slots is not None
        by_width.setdefault((part.tile.num_keys, -1 if is_plain else place), []).append(place)
    for places in by_width.values():
        parts = [tiles[place] for place in places]
        yield tuple(places), _EvenTiles(parts) if len(parts) > 1 else parts[0]


def _listed(requests: slice | IntArray) -> IntArray:
    return np.arange(requests.start, requests.stop) if isinstance(requests, slice) else requests


def _with_room(slots: IntArray) -> IntArray:
    """A copy with more columns, which repeat the last one."""
    return np.pad(slots, ((0, 0), (0, max(_ROOM, slots.shape[1] // 4))), mode="edge")


@define(eq=False)
class _Kept:
    """The tiles of one sliding window (None for none), and how they lie in the batch, as in a :class:`Tiling`.

    ``parts`` grow; each has the places of its tiles. ``num_steps`` is how many keys more leave all tiles small enough.
    """

    parts: tuple[tuple[tuple[int, ...], _GrowingTile | _EvenTiles], ...]
    ranges: tuple[slice, ...]
    order: torch.Tensor | None
    num_steps: int


class HostArrays:
    """The arrays of host tensors, kept for tensors that come again, as those of fixed buffers do in every step."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[torch.Tensor, npt.NDArray[Any]]] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """``tensor.numpy()``; one tensor is kept for each name."""
        known = self._known.get(name)
        if known is None or known[0] is not tensor:
            known = self._known[name] = tensor, tensor.numpy()
        return known[1]


class DecodeTiles:
    """The tilings of a step in which every request decodes one token, and those of the step that follows it.

    A step follows when it has the same requests at one token more each, in the same blocks; all of that is compared by
    value, so nothing is assumed of what happened in between. A window that hides keys moves with every step: its tiles
    are not kept.
    """

    def __init__(self, batch: AttentionBatch, block_size: int, arrays: HostArrays) -> None:
        """Keep what a following step is compared with. ``batch`` must decode (:meth:`decodes`)."""
        self._block_size = block_size
        self._arrays = arrays
        lens = batch.seq_lens_host.numpy()
        self._num_real = int(np.count_nonzero(lens))
        self._offsets = batch.query_start_loc_host.numpy().tobytes()
        self._is_real = (lens > 0).astype(lens.dtype)
        self._lens = lens.copy()
        self._blocks = batch.block_table.numpy().copy()
        num_blocks = -(-self._lens // block_size)
        self._width = int(num_blocks.max())
        self._is_used: npt.NDArray[np.bool_] = np.arange(self._blocks.shape[1]) < num_blocks[:, None]
        self._ids = self._blocks[:, : self._width].tobytes()
        self._kept: dict[int | None, _Kept] = {}
        self._steps_in_blocks = self._steps_until_a_border()

    @staticmethod
    def decodes(batch: AttentionBatch) -> bool:
        """Whether every request, but for padding at the end, has one query and a place for its key."""
        if batch.max_query_len != 1:
            return False
        lens, num_reqs = batch.seq_lens_host.numpy(), batch.num_reqs
        num_real = int(batch.query_start_loc_host[-1])
        is_decode = 0 < num_real <= num_reqs and bool(lens[:num_real].all()) and not lens[num_real:].any()
        return is_decode and bool((batch.slot_mapping[:num_real] >= 0).all())

    def keep(self, window: int | None, tiling: Tiling) -> None:
        """Let the tiling of a window grow with the steps that follow."""
        if window is None or int(self._lens.max()) <= window:
            parts = tuple(_grouped([_GrowingTile.of(tile, self._lens) for tile in tiling.tiles]))
            # A tile of one request may be of any size.
            rooms = [_MOST_KEYS // tile.num_reqs - tile.num_keys for tile in tiling.tiles if tile.num_reqs > 1]
            self._kept[window] = _Kept(parts, tiling.ranges, tiling.order, min(rooms, default=2**62))

    def follow(self, batch: AttentionBatch) -> bool:
        """Go on to ``batch`` if it follows; else nothing is changed and a new object is needed."""
        lens, arrays = self._lens + self._is_real, self._arrays
        if (
            batch.num_reqs != len(lens)
            or arrays("lengths", batch.seq_lens_host).tobytes() != lens.tobytes()
            or arrays("offsets", batch.query_start_loc_host).tobytes() != self._offsets
        ):
            return False
        blocks, width = arrays("blocks", batch.block_table), self._width
        if blocks.shape != self._blocks.shape:
            return False
        ids = blocks[:, :width].tobytes()
        if ids != self._ids:  # what is beyond a request's blocks may differ
            differs = blocks[:, :width] != self._blocks[:, :width]
            if np.logical_or.reduce(differs & self._is_used[:, :width], axis=None):
                return False
            self._ids = ids
        self._lens = lens
        self._steps_in_blocks -= 1
        if self._steps_in_blocks < 0:
            self._begin_blocks(blocks)
        return True

    def _begin_blocks(self, blocks: npt.NDArray[np.int32]) -> None:
        """Take in the blocks that some requests have begun with their latest key."""
        places = (self._lens - 1) // self._block_size
        begun = np.flatnonzero((places * self._block_size == self._lens - 1) & (self._is_real > 0))
        places = places[begun]
        self._blocks[begun, places] = blocks[begun, places]
        self._is_used[begun, places] = True
        self._width = max(self._width, int(places.max()) + 1)
        self._steps_in_blocks = self._steps_until_a_border()

    def _steps_until_a_border(self) -> int:
        """How many steps more no request begins a block."""
        return int((-self._lens % self._block_size)[: self._num_real].min())

    def grown(self, window: int | None, batch: AttentionBatch) -> Tiling | None:
        """The tiling of ``batch``, which was found to follow; None where it has to be built anew."""
        kept = self._kept.get(window)
        if kept is None:
            return None
        new_slots = self._arrays("slots", batch.slot_mapping)[: self._num_real]
        is_hiding = window is not None and int(self._lens.max()) > window
        if is_hiding or np.minimum.reduce(new_slots) < 0 or kept.num_steps < 1:
            del self._kept[window]
            return None
        kept.num_steps -= 1
        tiles: dict[int, Tile] = {}
        for places, part in kept.parts:
            tiles.update(zip(places, part.grow(new_slots), strict=True))
        return Tiling(tuple([tiles[place] for place in range(len(tiles))]), kept.ranges, kept.order)
