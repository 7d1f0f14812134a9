"""What a step sampled, on its way to the host, and what becomes of it there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from attrs import define, field, frozen

from .device import Device, Download, HostArray
from .errors import NothingToSample, RequestFailed
from .io import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from .records import NOTHING_LEFT, IntArray, LogprobsTensors, SamplerOutput

_NOTHING_LEFT = (
    "no token is left to sample: every logit is -inf once grammar, allowed_token_ids, bad_words, min_tokens and "
    "logit_bias are applied"
)


@frozen(eq=False)
class SampledOnHost:
    """A :class:`SamplerOutput` in host memory. Positions count in ``sampling_reqs``.

    ``errors`` says which positions have no token, and why; ``num_nans`` which of them had NaN among their logits.
    ``logprobs`` has a row for each of ``logprobs_reqs``.
    """

    token_ids: HostArray
    errors: dict[int, Exception]
    num_nans: dict[int, int]
    logprobs: LogprobsLists | None
    logprobs_reqs: IntArray | None
    prompt_logprobs: tuple[LogprobsLists, ...]


@frozen(eq=False)
class SampledDownload:
    """The copies of one :class:`SamplerOutput` that are on their way."""

    _output: SamplerOutput
    _token_ids: Download
    _health: Download | None
    _logprobs: tuple[Download, ...]
    _prompt_logprobs: tuple[tuple[Download, ...], ...]

    @classmethod
    def launch(cls, output: SamplerOutput, device: Device) -> SampledDownload:
        """Start copying everything that the host wants to know."""

        def download(tensors: LogprobsTensors) -> tuple[Download, ...]:
            return tuple([device.download(tensor) for tensor in tensors])

        return cls(
            output,
            device.download(output.sampled_token_ids),
            None if output.health is None else device.download(output.health),
            () if output.logprobs is None else download(output.logprobs),
            tuple([download(tensors) for tensors in output.prompt_logprobs]) if output.prompt_logprobs else (),
        )

    def ready(self) -> bool:
        """Whether all of it has arrived."""
        rest = (self._health,) if self._health is not None else ()
        copies = (self._token_ids, *rest, *self._logprobs, *(copy for part in self._prompt_logprobs for copy in part))
        return all(copy.ready() for copy in copies)

    def wait(self, req_ids: Sequence[str], vocab_size: int, are_checked: bool = False) -> SampledOnHost:
        """Wait for all of it. ``req_ids`` are the requests that sampled, in order; ``are_checked``: their ids are."""
        token_ids, output = self._token_ids.wait(), self._output
        errors: dict[int, Exception] = {}
        num_nans: dict[int, int] = {}
        if self._health is not None:
            health = self._health.wait()
            for position in map(int, np.flatnonzero(health)):
                reason = _NOTHING_LEFT
                if health[position] != NOTHING_LEFT:
                    num_nans[position] = int(health[position])
                    reason = f"the model gave {num_nans[position]} NaN among its logits"
                errors[position] = _failure(req_ids[position], reason)
        if not (are_checked or are_in_vocabulary(token_ids, vocab_size)):
            for position in map(int, np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))):
                reason = f"sampled token {token_ids[position]} is outside the vocabulary of {vocab_size}"
                errors.setdefault(position, _failure(req_ids[position], reason))
        prompt_logprobs = tuple([_arrived(part, None) for part in self._prompt_logprobs])
        logprobs = _arrived(self._logprobs, output.num_logprobs) if self._logprobs else None
        return SampledOnHost(token_ids, errors, num_nans, logprobs, output.logprobs_reqs, prompt_logprobs)


def are_in_vocabulary(token_ids: HostArray, vocab_size: int) -> bool:
    """Whether all ids, int64 ``[n]``, are. In one look: as unsigned numbers, negative ones are large."""
    return not len(token_ids) or int(np.maximum.reduce(token_ids.view(np.uint64))) < vocab_size


def _failure(req_id: str, reason: str) -> RequestFailed:
    return (NothingToSample if reason is _NOTHING_LEFT else RequestFailed)(req_id, reason)


def _arrived(copies: tuple[Download, ...], num_logprobs: IntArray | None) -> LogprobsLists:
    """Log probabilities that were waited for; columns beyond a row's ``num_logprobs`` hold -1 and ``-inf``."""
    token_ids, logprobs, ranks = [copy.wait() for copy in copies]
    if num_logprobs is None:
        return LogprobsLists(token_ids, logprobs, ranks)
    unasked = np.arange(token_ids.shape[1]) > num_logprobs[:, None]
    return LogprobsLists(np.where(unasked, -1, token_ids), np.where(unasked, np.float32(-np.inf), logprobs), ranks)


@define(eq=False)
class StepOutput(AsyncModelRunnerOutput):
    """The output of a step that was launched: built once, when somebody asks, after those of the steps before it."""

    _download: SampledDownload | None
    _build: Callable[[SampledDownload], ModelRunnerOutput] | None
    _previous: StepOutput | None
    _on_error: Callable[[BaseException], None]
    _output: ModelRunnerOutput | None = None
    _error: BaseException | None = None
    _lock: threading.Lock = field(factory=threading.Lock)

    @property
    def is_collected(self) -> bool:
        """Whether the output, or its error, is known on the host."""
        return self._build is None

    @property
    def is_pending(self) -> bool:
        """Whether the steps after this one have to wait for it, or for its error."""
        return self._build is not None or self._error is not None

    def ready(self) -> bool:
        """Whether ``get_output`` would return at once."""
        download, previous = self._download, self._previous
        return (download is None or download.ready()) and (previous is None or previous.ready())

    def get_output(self) -> ModelRunnerOutput:
        """Wait, then give the output; the same object each time. Raises what the device raised, each time."""
        with self._lock:
            if self._build is not None:
                self._collect(self._build)
            if self._error is not None:
                raise self._error
            assert self._output is not None, "a collected step has an output or an error"
            return self._output

    def _collect(self, build: Callable[[SampledDownload], ModelRunnerOutput]) -> None:
        """An interrupt while waiting leaves everything as it was; an error of the device is kept."""
        assert self._download is not None, "only a collected step has dropped its copies"
        try:
            if self._previous is not None:
                self._previous.get_output()
            self._output = build(self._download)
        except Exception as error:
            self._error = error
            self._on_error(error)
        self._download = self._build = self._previous = None
