"""A runner's life: loading, memory, capture, sleep, shutdown; and what can be looked at from outside."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..fsm import SLEEP_PARTS, InputRefused, LifeMachine, LifeState, Observers, StepMachine, StepState, Transaction
from ..stages.columns import Column
from ..stages.device import Device
from ..stages.forward_context import Model
from ..stages.sampling_params import SamplingParams
from ..stages.specs import KVCacheGroupSpec, ModelSpec
from .assembly import Assembly, assemble
from .backends import device_for
from .config import EngineConfig
from .dummy_runs import DummyRuns, ProfileResult
from .loading import LoadedModel, load_model
from .models import Decoder
from .models.weights import fill
from .observe import ActivationHooks, HookFunction, ObserveHandle, observable
from .stage_set import StageSet


class RunnerLife:
    """Everything about a runner but its steps. One thread at a time drives it; ``state`` and ``life`` are for any."""

    def __init__(self, config: EngineConfig, *, model: Model | None = None, device: Device | None = None) -> None:
        self.config = config
        self.observers = Observers()
        self._hooks = ActivationHooks(self.observers)
        self.loaded: LoadedModel | None = None
        self._model = model
        self._device = device
        self._parts: Assembly | None = None
        self._machine = StepMachine()
        self._life = LifeMachine()

    # ---- what can be looked at

    @property
    def state(self) -> StepState:
        """Where the runner stands between two calls. May be read from any thread."""
        return self._machine.state

    @property
    def life(self) -> LifeState:
        """How far the runner has come. May be read from any thread."""
        return self._life.state

    @property
    def fault_reason(self) -> str:
        """Why the runner is FAULTED; empty if it is not."""
        return self._life.fault_reason

    @property
    def spec(self) -> ModelSpec:
        """The shape of the loaded model."""
        return self._loaded_model("spec").spec

    @property
    def kv_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """KV-cache groups: a request has one list of block ids for each."""
        return self.parts.groups

    @property
    def kv_cache_generation(self) -> int:
        """How often the KV cache lost its content: what a scheduler knows of blocks is void when this changes."""
        return self.parts.kv_cache.generation

    @property
    def stages(self) -> StageSet:
        """The stages, editable between steps."""
        return self.parts.stages

    @property
    def parts(self) -> Assembly:
        """Tables, buffers and caches, for stages of one's own and for tests.

        Raises:
            StepStateError: before ``initialize_kv_cache``.
        """
        if self._parts is None:
            self._life.require_ready("initialize_kv_cache")
        assert self._parts is not None, "a ready runner has its parts"
        return self._parts

    @property
    def observable(self) -> tuple[str, ...]:
        """The names that :meth:`observe` knows, in the order in which they are computed."""
        return observable(self._loaded_model("observable"))

    def observe(self, pattern: str, fn: HookFunction, *, edit: bool = False) -> ObserveHandle:
        """Call ``fn`` with every :class:`Activation` whose name matches, from the next step on.

        ``pattern`` is a name of :attr:`observable`, or has wildcards as file names do (``layers.*.mlp``). With ``edit``
        a tensor that ``fn`` returns takes the activation's place. Keys and values that were computed so stay in the
        cache, for the requests that share them too. Steps run without graphs while anything but logits is observed.

        Raises:
            InputRefused: nothing has such a name.
            StepStateError: before ``initialize_kv_cache``.
        """
        self._ready("observe")
        return self._hooks.add(self.observable, pattern, fn, edit=edit)

    def check_params(self, params: SamplingParams) -> None:
        """Whether a request with these parameters would be taken. From any thread.

        Raises:
            InvalidSamplingParams: a token id outside the vocabulary, or an ``extra`` that no column reads or accepts.
        """
        self.parts.table.checked_extra(params.checked_for(self.spec.vocab_size))

    def add_column(self, column: Column) -> None:
        """Keep per-request state for a stage of one's own, and read the parameters in ``extra`` that it names.

        Raises:
            ColumnRefused: a request is live, or another column reads a parameter of the same name.
            StepStateError: a step is open, or the runner is not ready.
        """
        table = self._ready("add_column").table
        self._machine.fire("dummy", lambda: table.add_column(column), call="add_column")

    def remove_column(self, column: Column) -> None:
        """Take a column out again. Raises as :meth:`add_column`, also where it is not there."""
        table = self._ready("remove_column").table
        self._machine.fire("dummy", lambda: table.remove_column(column), call="remove_column")

    def _ready(self, call: str) -> Assembly:
        self._life.require_ready(call)
        return self.parts

    def _loaded_model(self, call: str) -> Model:
        if self._model is None:
            self._life.require_ready(call)
        assert self._model is not None, "a loaded runner has its model"
        return self._model

    # ---- life

    def load_model(self) -> None:
        """Read the model that ``config.model`` names (unless one was given) and resolve the configuration.

        Raises:
            ModelLoadError: the model can't be read; the message names the file, key or tensor.
            InvalidConfig: a value that cannot work with this model or machine.
        """

        def load() -> None:
            model = self._model
            if model is None:
                self.loaded = load_model(
                    self.config.model,
                    device=self.config.device,
                    dtype=self.config.dtype,
                    native=self.config.native and not self.config.compile,
                )
                model = self.loaded.model
            self._model = model
            self.config = self._resolved(model)

        self._life.load(load)

    def _resolved(self, model: Model) -> EngineConfig:
        """The configuration for this model; where the KV cache is to fill a GPU, its size is measured first."""
        device, dtype = _place_of(model)
        asked = self.config
        config = asked.resolve(model.spec, device=device, dtype=dtype)
        if self._device is None:
            self._device = device_for(config.device)
        if device.type != "cuda" or asked.num_kv_blocks != "auto" or asked.kv_cache_memory_bytes != "auto":
            return config
        from .cuda.memory import kv_cache_budget

        budget = kv_cache_budget(config, device, lambda tried: DummyRuns(self._trial(model, tried)))
        return asked.replace(kv_cache_memory_bytes=budget).resolve(model.spec, device=device, dtype=dtype)

    def _trial(self, model: Model, config: EngineConfig) -> Assembly:
        """Tables, buffers and stages of their own, with the smallest KV cache."""
        assert self._device is not None, "the device is known once the configuration is"
        return assemble(model, config.replace(num_kv_blocks=2), StepMachine(), self._device, self._fault)

    def initialize_kv_cache(self) -> None:
        """Allocate the KV cache, tables and buffers, and build the stages.

        Raises:
            StepStateError: the model is not loaded, or this was done before.
        """

        def initialize() -> None:
            model = self._loaded_model("initialize_kv_cache")
            assert self._device is not None, "a loaded runner has its device"
            self._parts = assemble(model, self.config, self._machine, self._device, self._fault, self._hooks)
            self._hooks.use_graphs(self._parts.graphs.captured)

        self._life.initialize(initialize)

    def capture_model(self) -> int:
        """Capture every graph of the dispatch table, large shapes first; graphs of before are dropped.

        Returns how many were captured: none where ``cudagraph_mode`` is NONE.
        """
        runs = DummyRuns(self._ready("capture_model"))
        return self._machine.fire("dummy", runs.capture, call="capture_model")

    def dummy_run(self, num_tokens: int = 1) -> None:
        """A forward pass of padding: it touches no request and no block. For warm-up and idle ranks."""
        runs = DummyRuns(self._ready("dummy_run"))
        self._machine.fire("dummy", lambda: runs.run(num_tokens), call="dummy_run")

    def profile_run(self) -> ProfileResult:
        """The largest forward pass, measured, with tables of its own: legal as soon as the model is loaded."""
        if self.life is not LifeState.LOADED:
            self._life.require_ready("profile_run")
        model = self._loaded_model("profile_run")

        def profile() -> ProfileResult:
            config = self.config.replace(cudagraph_mode="NONE", cudagraph_capture_sizes=())
            return DummyRuns(self._trial(model, config)).profile()

        return self._machine.fire("dummy", profile, call="profile_run")

    def sleep(self, level: int = 1) -> None:
        """Give memory back between steps: level 1 the KV cache, level 2 the weights too. Idempotent.

        Live requests are preempted: their tokens are kept, their blocks are gone, and the scheduler resumes them as
        it resumes any preempted request.

        Raises:
            StepStateError: a step is open, or the runner is not ready.
            InputRefused: another level, or level 2 of a model that was given as an object (nothing to reload it from).
        """
        if level not in (1, 2):
            raise InputRefused(f"sleep level {level!r}: use 1 (KV cache) or 2 (KV cache and weights)")
        if level == 2 and self.loaded is None:
            raise InputRefused("sleep level 2 needs a model that load_model() can read again; use level 1")
        parts = ("kv_cache",) if level == 1 else ("kv_cache", "weights")

        def fall_asleep(falling: frozenset[str]) -> None:
            self._wait_for_outputs()
            self._fall_asleep(falling)

        self._machine.fire("settle", lambda: self._life.sleep(fall_asleep, parts), call="sleep")

    def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Take memory again: all of it, or the parts in ``tags`` ("weights", "kv_cache"). Idempotent.

        The cache comes back zeroed; captured graphs do not come back: call ``capture_model`` again.

        Raises:
            InputRefused: an unknown tag.
            ModelLoadError: the weights can't be read again; they stay asleep.
        """
        chosen = SLEEP_PARTS if tags is None else (tags,) if isinstance(tags, str) else tuple(tags)
        self._machine.fire("settle", lambda: self._life.wake(self._rise, chosen), call="wake_up")

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write new values into the model between steps, in place: Hugging Face names, some of them or all.

        Keys and values in the cache stay those of the old weights: preempt what is live, and reset the scheduler's
        prefix cache, if they may not mix.

        Raises:
            StepStateError: a step is open, or the weights sleep.
            WeightsError: an unknown or mis-shaped tensor; nothing was written.
        """
        given = list(weights)

        def update() -> None:
            if "weights" in self._life.asleep_parts or self.life not in (LifeState.READY, LifeState.ASLEEP):
                self._life.require_ready("update_weights")
            self._wait_for_outputs()
            decoder = self._decoder("update_weights")
            # A rehearsal without memory refuses what does not fit before anything is written.
            shapes = {name: tensor.to("meta") for name, tensor in decoder.parameters.items()}
            fill(shapes, ((name, tensor.to("meta")) for name, tensor in given), allow_missing=True)
            decoder.load_weights(given, allow_missing=True)

        self._machine.fire("settle", update, call="update_weights")

    def _decoder(self, call: str) -> Decoder:
        model = self._loaded_model(call)
        if not isinstance(model, Decoder):
            raise InputRefused(f"{call} needs a model of this engine, not a {type(model).__name__}")
        return model

    def _fall_asleep(self, parts: frozenset[str]) -> None:
        self.parts.graphs.drop("the runner slept")
        if "kv_cache" in parts:
            table, transaction = self.parts.table, Transaction(0)
            table.recover_rows()
            try:
                for record in list(table.records.values()):
                    table.preempt(record, transaction)
            except BaseException:
                transaction.rollback()
                raise
            transaction.commit()
            self.parts.kv_cache.release()
        if "weights" in parts and self.loaded is not None:
            self.loaded.release_weights()

    def _rise(self, parts: frozenset[str]) -> None:
        if "weights" in parts and self.loaded is not None:
            self.loaded.reload_weights()
        if "kv_cache" in parts:
            self.parts.kv_cache.restore()

    def _close(self) -> None:
        """Drop graphs, tables, cache and model."""
        if self._parts is not None:
            self._parts.graphs.drop("the runner was shut down")
            self._parts.kv_cache.release()
        self._parts = self._model = self.loaded = None

    def _wait_for_outputs(self) -> None:
        if self._parts is not None and self._parts.table.latest_output is not None:
            self._parts.table.latest_output.get_output()

    def _fault(self, error: BaseException) -> None:
        self._life.fault(f"a step failed on the device: {type(error).__name__}: {error}", error)


def _place_of(model: Model) -> tuple[torch.device, torch.dtype]:
    """Where the weights of a model of this engine lie, and in what type; others are on the CPU in float32."""
    if isinstance(model, Decoder):
        return model.weights.embedding.device, model.weights.embedding.dtype
    return torch.device("cpu"), torch.float32
