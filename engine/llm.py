"""One-liners: a model, prompts in, texts out."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Self

from ..stages.errors import InvalidSamplingParams
from ..stages.sampling_params import SamplingParams
from .config import EngineConfig
from .loop_admission import Prompt, is_chat
from .loop_handle import RequestHandle
from .loop_structured import Structure
from .model_runner import ModelRunner, build_runner
from .outputs import RequestOutput
from .serving_loop import ServingLoop
from .structured import InvalidGrammar

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
Grammars = Structure | Sequence[Structure | None] | None
Chat = Sequence[Mapping[str, Any]]


class LLM:
    """A model behind a serving loop of its own, for programs that only want answers.

    Args:
        model: a Hugging Face folder or hub id, a GGUF file, or "smollm2" for the packaged model.
        async_scheduling: start each step before the last one's tokens have arrived; False waits for them.
        overrides: any other field of :class:`EngineConfig`.

    Raises:
        ModelLoadError: the model can't be read.
        InvalidConfig: a setting that cannot work.
    """

    def __init__(self, model: str = "smollm2", *, async_scheduling: bool = True, **overrides: Any) -> None:
        self.runner = build_runner(EngineConfig(model=model, async_scheduling=async_scheduling, **overrides))
        self.loop = ServingLoop(self.runner).start()
        # Also when it is garbage, or the program ends.
        self._close = weakref.finalize(self, _shut, self.loop, self.runner)

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, grammar: Grammars = None, progress: bool = False
    ) -> list[RequestOutput]:
        """Results in the order of the prompts.

        Args:
            prompts: one or a list of: text, token ids (a list, or ``{"prompt_token_ids": [...]}``), chat messages.
            sampling_params: for all prompts, or a list with one for each.
            grammar: what the texts have to be (a :class:`GrammarSpec`), for all prompts, or a list with one for each.
            progress: count what is done on stderr.

        Raises:
            TwoStrokeError: a prompt was refused or failed; the others are aborted.
        """
        chosen = as_prompts(prompts)
        handles: list[RequestHandle] = []
        try:
            rows = zip(chosen, _params_for(chosen, sampling_params), _grammars_for(chosen, grammar), strict=True)
            for prompt, params, structure in rows:
                handles.append(self.loop.add(prompt, params, grammar=structure))
            results: list[RequestOutput] = []
            for handle in handles:
                results.append(handle.result())
                if progress:
                    _show_progress(len(results), len(handles))
            return results
        finally:
            for handle in handles:
                handle.close()

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: Params = None,
        *,
        grammar: Grammars = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Like :meth:`generate`, for one conversation or a list of them."""
        return self.generate(messages, sampling_params, grammar=grammar, progress=progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, grammar: Structure | None = None
    ) -> RequestHandle:
        """One prompt, to be iterated over (``for`` or ``async for``) while its text comes."""
        return self.loop.add(prompt, sampling_params or SamplingParams(), grammar=grammar)

    def close(self) -> None:
        """Stop serving and free the model; requests in flight end with finish reason "abort". Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def as_prompts(prompts: Prompts) -> list[Prompt]:
    """A list of prompts, from one prompt or several."""
    if isinstance(prompts, (str, Mapping)) or is_chat(prompts) or not isinstance(prompts, Iterable):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and all(isinstance(token, Integral) for token in several) else several


def _params_for(prompts: Sequence[Prompt], params: Params) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise InvalidSamplingParams("sampling_params", f"must be SamplingParams, or a list of them, got {params!r:.80}")
    if len(params) != len(prompts):
        raise InvalidSamplingParams("sampling_params", f"{len(params)} were given for {len(prompts)} prompts")
    return params


def _grammars_for(prompts: Sequence[Prompt], grammar: Grammars) -> Sequence[Structure | None]:
    if not isinstance(grammar, list | tuple):
        return [grammar] * len(prompts)  # pyright: ignore[reportReturnType]
    if len(grammar) != len(prompts):
        raise InvalidGrammar("grammar", f"{len(grammar)} were given for {len(prompts)} prompts")
    return grammar


def _show_progress(done: int, total: int) -> None:
    print(f"\r{done}/{total} requests", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _shut(loop: ServingLoop, runner: ModelRunner) -> None:
    loop.stop()
    runner.shutdown()
