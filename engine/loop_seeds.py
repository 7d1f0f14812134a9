"""Seeds of requests without one, whose ids may come again."""

from __future__ import annotations

import hashlib
import threading

from attrs import evolve

from ..stages.sampling_params import SamplingParams

_IDS_A_GENERATION = 4096


class SeedsOfReusedIds:
    """Gives an unseeded request a seed where its id alone would let it draw what an earlier request drew.

    The runner makes the seed of an unseeded request of the engine's seed and the request's id. That is kept for the
    first request of an id. Any other one is told apart by how many had its id before and by the generation of the
    memory for ids: that holds the latest two generations of 4,096 ids, and an id that it has forgotten is taken for a
    new one of a later generation. As the seed is a parameter then, it is recorded and replayed like one that was given.
    Any thread may call it.
    """

    def __init__(self, engine_seed: int) -> None:
        self._key = engine_seed.to_bytes(16, "little", signed=True)
        self._latest: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._generation = 0
        self._lock = threading.Lock()

    def __call__(self, request_id: str, params: SamplingParams) -> SamplingParams:
        """``params``, with a seed where one is needed."""
        if not _draws_by_id(params):
            return params
        num_uses, generation = self._count(request_id)
        if num_uses == generation == 0:
            return params
        text = f"{num_uses} {generation} {request_id}".encode(errors="surrogatepass")
        digest = hashlib.blake2b(text, digest_size=8, key=self._key).digest()
        return evolve(params, seed=int.from_bytes(digest, "little"))

    def take_back(self, request_id: str, params: SamplingParams) -> None:
        """The request that was last given these ``params`` (before its seed) was refused, and drew nothing."""
        if _draws_by_id(params):
            with self._lock:
                self._latest[request_id] = max(self._latest.get(request_id, 0) - 1, 0)

    def _count(self, request_id: str) -> tuple[int, int]:
        """How many requests are known to have had this id before, and the generation of this one."""
        with self._lock:
            if len(self._latest) >= _IDS_A_GENERATION:
                self._before, self._latest = self._latest, {}
                self._generation += 1
            num_uses = self._latest.get(request_id, self._before.get(request_id, 0))
            self._latest[request_id] = num_uses + 1
            return num_uses, self._generation


def _draws_by_id(params: SamplingParams) -> bool:
    return params.seed is None and not params.is_greedy
