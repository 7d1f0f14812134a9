"""Garbage at every public entrance: an error of our own that names the thing, and nothing changed by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modes import MODES
from twostroke.engine import cli, cli_generate
from twostroke.engine import llm as llm_module
from twostroke.engine.config import InvalidConfig
from twostroke.engine.llm import LLM
from twostroke.engine.loading import load_model
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.models.errors import ModelLoadError
from twostroke.engine.models.random_model import tiny_config
from twostroke.engine.scheduler import RequestRefused
from twostroke.engine.serving_loop import LoopState
from twostroke.engine.tokenizer import InvalidText, Tokenizer, TokenizerError
from twostroke.fsm import InputRefused, Pipeline, StepState, TwoStrokeError, WiringError
from twostroke.stages.errors import InvalidSamplingParams
from twostroke.stages.sampling_params import SamplingParams

MakeRunner = Callable[..., ModelRunner]
NAN = float("nan")

PARAMS: list[dict[str, Any]] = [
    *({"temperature": value} for value in (NAN, float("inf"), -1, "1", None, True, [1.0])),
    *({"top_p": value} for value in (0, NAN, 1.1, None)),
    *({"top_k": value} for value in (None, 1.5, -2, "3", True)),
    *({"min_p": value} for value in (2, NAN, None)),
    *({"seed": value} for value in (1.5, 2**64, -(2**63) - 1, True, "1")),
    *({"n": value} for value in (0, None, 1.0, True)),
    *({"max_tokens": value} for value in (0, "5", 1.0, True)),
    *({"min_tokens": value} for value in (None, -1, 17, "2")),
    *({"stop": value} for value in (5, [5], b"x", [b"ab"], "", [""], [None], {1: 2})),
    *({"bad_words": value} for value in (5, [5], [b"x"], [""], [None])),
    *({"stop_token_ids": value} for value in (5, "ab", ["a"], [1.5], [None], [[1]], NAN)),
    *({"eos_token_ids": value} for value in (2, "ab", ["a"], [None])),
    *({"allowed_token_ids": value} for value in (5, [], "ab", ["a"], [1.5], {"a": 1})),
    *({"bad_words_token_ids": value} for value in (5, [5], [[]], ["ab"], [["a"]], [[1.5]])),
    *({"logit_bias": value} for value in ([1], "ab", {"5": 1.0}, {5: NAN}, {5: None}, {-1: 1.0}, {1.5: 1.0}, 0)),
    *({"logprobs": value} for value in (-2, True, "1", 1.0)),
    *({"prompt_logprobs": value} for value in (-2, True, "1", 1.0)),
    *({"repetition_penalty": value} for value in (0, NAN, -1, None)),
    *({"presence_penalty": value} for value in (3, NAN)),
    *({"frequency_penalty": value} for value in (-3, "1")),
]


@pytest.mark.parametrize("garbage", PARAMS, ids=lambda garbage: f"{garbage}"[1:-1])
def test_sampling_params_name_the_parameter(garbage: dict[str, Any]) -> None:
    (name,) = garbage
    with pytest.raises(InvalidSamplingParams) as raised:
        SamplingParams(**garbage)
    assert raised.value.parameter in (name, name.removesuffix("_token_ids"))
    assert str(raised.value).startswith(raised.value.parameter)


def test_sampling_params_take_what_other_libraries_give() -> None:
    """None for "off" wherever a list is expected, and integers of any kind in lists."""
    off = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, bad_words_token_ids=None, eos_token_ids=None)  # pyright: ignore[reportArgumentType]
    assert off == SamplingParams()
    ids = SamplingParams(
        stop_token_ids=np.array([3, 4]), allowed_token_ids=range(2), bad_words_token_ids=[np.array([5])]
    )  # pyright: ignore[reportArgumentType]
    assert (ids.stop_token_ids, ids.allowed_token_ids, ids.bad_words_token_ids) == ((3, 4), (0, 1), ((5,),))
    assert all(type(token) is int for token in ids.stop_token_ids)


CONFIGS: list[dict[str, Any]] = [
    *({"max_num_seqs": value} for value in (0, True, "4", 4.0, None, -1)),
    *({"max_num_batched_tokens": value} for value in (None, 16.0, "16", 3)),
    *({"max_model_len": value} for value in ("foo", None, 0, 100.0, 129, True, -1)),
    *({"block_size": value} for value in (0, None, 4.0, "4")),
    *({"num_kv_blocks": value} for value in ("foo", None, 1, 2.5, -4, True)),
    *({"kv_cache_memory_bytes": value} for value in (-1, 0, "4GB", None, 1.5e6)),
    *({"cudagraph_mode": value} for value in ("foo", None, "none", 2, ["FULL"])),
    *({"cudagraph_capture_sizes": value} for value in ("all", 5, None, ("a",), (1.5,))),
    *({"cudagraph_capture_sizes": value, "cudagraph_mode": "FULL"} for value in ((), (0,), (17,), "all")),
    *({"device": value} for value in ("tpu", 5, "", None, "cpu:x")),
    *({"dtype": value} for value in ("int8", None, 32)),
    *({"num_ubatches": value} for value in (0, None, "2")),
    *({"ubatch_decode_threshold": value} for value in (-1, None, "2")),
    *({"ubatch_prefill_threshold": value} for value in (-1, 2.5)),
    *({"seed": value} for value in ("x", None, 1.5, 2**64, -(2**63) - 1, True)),
    *({"enable_prefix_caching": value} for value in ("no", None, 1)),
    *({"async_scheduling": value} for value in ("no", None)),
]


@pytest.mark.parametrize("garbage", CONFIGS, ids=lambda garbage: f"{garbage}"[1:-1])
def test_configurations_name_the_value(make_runner: MakeRunner, garbage: dict[str, Any]) -> None:
    name = next(iter(garbage))
    with pytest.raises(InvalidConfig, match=name):
        make_runner(**garbage)


@pytest.mark.parametrize("num_tokens", [0, -1, 17, 1.5, "x", None])
def test_dummy_runs_fit_the_largest_step(make_runner: MakeRunner, num_tokens: Any) -> None:
    runner = make_runner()
    with pytest.raises(InputRefused, match="1 to 16 tokens"):
        runner.dummy_run(num_tokens)
    assert runner.state is StepState.IDLE
    with pytest.raises(InputRefused, match="1 to 24 tokens"):
        make_runner(max_num_seqs=1, max_num_batched_tokens=64).dummy_run(25)


MODELS = [
    "",
    "nope",
    "/nonexistent/x",
    "a/b/c",
    "org/no-such-model",
    "/etc/passwd",
    "x.gguf",
    "a\0b",
    "a" * 5000,
    5,
    None,
    b"x",
]


@pytest.mark.parametrize("name", MODELS, ids=lambda name: f"{name!r:.20}".replace("\\x00", "NUL"))
def test_models_that_are_not_there(name: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"model|folder|GGUF"):
        load_model(name)


@pytest.mark.parametrize("device", ["tpu", "", 5, None, "cuda:99"])
def test_a_device_that_is_not_there(device: Any) -> None:
    with pytest.raises(ModelLoadError, match="device"):
        load_model("smollm2", device=device)


FOLDERS: dict[str, dict[str, str]] = {
    "no JSON": {"config.json": "{"},
    "a list": {"config.json": "[]"},
    "architectures are a number": {"config.json": json.dumps(tiny_config(architectures=5))},
    "sizes are text": {"config.json": json.dumps(tiny_config(hidden_size="32"))},
    "no heads": {"config.json": json.dumps(tiny_config(num_attention_heads=0))},
    "eps is a list": {"config.json": json.dumps(tiny_config(rms_norm_eps=[]))},
    "eps is null": {"config.json": json.dumps(tiny_config(rms_norm_eps=None))},
    "rope is a number": {"config.json": json.dumps(tiny_config(rope_parameters=3))},
    "rope type is a list": {"config.json": json.dumps(tiny_config(rope_parameters={"rope_type": ["x"]}))},
    "end of sequence is text": {"config.json": json.dumps(tiny_config(eos_token_id="x"))},
    "an end of sequence is text": {"generation_config.json": '{"eos_token_id": [1, "x"]}'},
    "index of numbers": {"model.safetensors.index.json": '{"weight_map": {"a": 5}}'},
    "index of a list": {"model.safetensors.index.json": '{"weight_map": ["a"]}'},
    "template is a number": {"tokenizer_config.json": '{"chat_template": 5}'},
    "nameless template": {"tokenizer_config.json": '{"chat_template": [{"name": "x"}]}'},
    "template of texts": {"tokenizer_config.json": '{"chat_template": ["x"]}'},
    "tokenizer is empty": {"tokenizer.json": "{}"},
}


@pytest.mark.parametrize("case", FOLDERS)
def test_malformed_model_folders(tmp_path: Path, model: Any, case: str) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in model.parameters.items()}, tmp_path / "model.safetensors"
    )
    assert load_model(str(tmp_path)).spec.vocab_size == 64
    for name, text in FOLDERS[case].items():
        (tmp_path / name).write_text(text)
    with pytest.raises((ModelLoadError, TokenizerError, TwoStrokeError), match=str(tmp_path)):
        load_model(tmp_path)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        pytest.param({"tokenizer.ggml.merges": ['A "']}, "malformed", id="a merge that makes no token"),
        pytest.param({"tokenizer.ggml.merges": 5}, "malformed", id="merges are a number"),
        pytest.param({"tokenizer.ggml.tokens": [1, 2]}, "malformed", id="tokens are numbers"),
        pytest.param({"tokenizer.ggml.model": "wordpiece"}, "wordpiece", id="another kind"),
    ],
)
def test_a_tokenizer_that_its_library_panics_at_is_refused(metadata: dict[str, Any], words: str) -> None:
    """The library's panics are no Exceptions: they would go through every handler up to the top."""
    sound = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["A", "B", '"', "AB"],
        "tokenizer.ggml.merges": ["A B"],
    }
    assert Tokenizer.from_gguf(sound).encode("AB") == [3]
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.from_gguf({**sound, **metadata})


@pytest.fixture(scope="module")
def tiny(make_runner: MakeRunner) -> Any:
    """An LLM over the tiny model, without a tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "build_runner", lambda config: make_runner(num_kv_blocks=40))
        with LLM("tiny") as llm:
            yield llm


PROMPTS: dict[str, Any] = {
    "None": None,
    "a number": 5,
    "nothing": [[]],
    "bytes outside the vocabulary": [b"abc"],
    "text without a tokenizer": "abc",
    "numbers and text": [1, "a"],
    "nested too deep": [[[1]]],
    "outside the vocabulary": [64],
    "negative": [-1],
    "a fraction": [[1.5]],
    "a dict of nothing": {"prompt": None},
    "a chat without a template": [{"role": "user", "content": "x"}],
    "messages without a role": [{"content": "x"}],
    "too long": list(range(24)),
}
PARAMETERS: dict[str, Any] = {
    "a dict": {"max_tokens": 3},
    "text": "abc",
    "a number": 5,
    "a list of None": [None],
    "a list of dicts": [{}],
    "too many": [SamplingParams()] * 2,
    "stop strings without text": SamplingParams(stop="x"),
    "a token outside the vocabulary": SamplingParams(stop_token_ids=[64]),
}


@contextmanager
def refused(error: type[Exception], case: str) -> Iterator[None]:
    """Like ``pytest.raises``, for a loop over cases."""
    try:
        yield
    except error:
        return
    raise AssertionError(f"{case} was taken")


def test_a_program_that_gives_garbage_disturbs_nobody(tiny: LLM) -> None:
    neighbour = tiny.stream([1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0))
    for case, prompt in PROMPTS.items():
        with refused(RequestRefused, case):
            tiny.generate(prompt)
    for case, params in PARAMETERS.items():
        with refused(InvalidSamplingParams, case):
            tiny.generate([[1, 2]], params)
    for request_id in (5, [1], "\ud800"):
        with pytest.raises(RequestRefused, match="string"):
            tiny.loop.add([1], request_id=request_id)  # pyright: ignore[reportArgumentType]
    assert len(neighbour.result(timeout=30).outputs[0].token_ids) == 20
    assert tiny.loop.state is LoopState.RUNNING
    assert tiny.loop.num_live_requests == 0


def test_token_ids_of_other_libraries_are_one_prompt(tiny: LLM) -> None:
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    (expected,) = tiny.generate([1, 2, 3], greedy)
    for prompt in ((1, 2, 3), np.array([1, 2, 3]), iter([1, 2, 3]), [np.int64(1), 2, 3]):
        (result,) = tiny.generate(prompt, greedy)  # pyright: ignore[reportArgumentType]
        assert result.outputs == expected.outputs


@pytest.mark.model
def test_text_that_is_no_text_is_refused(smollm2_tokenizer: Tokenizer) -> None:
    for text in ("\ud800 half", "x\udfff", 5, None, b"x"):
        with pytest.raises(InvalidText, match="cannot be tokenized"):
            smollm2_tokenizer.encode(text)  # pyright: ignore[reportArgumentType]
    for text in ("", "\0", "\ufffe", "👩‍👩‍👧", "\u202e", "<|im_start|>"):
        assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--prompts-file", "latin1.txt"], "latin1.txt is not UTF-8", id="encoding"),
        pytest.param(["--num-threads", str(10**14)], "--num-threads", id="threads"),
        pytest.param(["--seed", str(2**64)], "seed", id="seed"),
        pytest.param(["--top-p", "nan"], "top_p", id="nan"),
        pytest.param(["--stop", ""], "stop", id="stop"),
        pytest.param(["--model", "", "--prompt", "x"], "config.json", id="model"),
        pytest.param(["--device", "cuda:99", "--prompt", "x"], "device", id="device"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["generate", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_seeds_of_several_prompts_start_over_beyond_64_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = cli.build_parser().parse_args(["generate", "--seed", str(2**64 - 1)])
    seeds = [cli_generate._params(arguments, index).seed for index in range(3)]
    assert seeds == [2**64 - 1, 0, 1]


def double(inner: Callable[..., Any]) -> Callable[..., Any]:
    return inner


@pytest.mark.parametrize(
    "stages", [[double], [("x",)], [(5, double)], [("", double)], ["ab"], [None]], ids=lambda stages: f"{stages!r:.12}"
)
def test_a_pipeline_wants_names_and_callables(stages: list[Any]) -> None:
    with pytest.raises(WiringError, match="pair of its name and a callable"):
        Pipeline(stages)


@pytest.mark.parametrize(
    "garbage", [None, 5, "sample", lambda inner: 5], ids=["None", "number", "text", "gives a number"]
)
def test_a_wrapper_wants_a_function(runner: ModelRunner, garbage: Any) -> None:
    before = runner.stages.describe()
    with pytest.raises(WiringError, match="sample"):
        runner.stages.wrap("sample", garbage)
    assert runner.stages.describe() == before


@pytest.mark.parametrize("mode", ["eager", "full_and_piecewise"])
def test_edits_that_do_not_fit_change_nothing(make_runner: MakeRunner, mode: str) -> None:
    runner = make_runner(**MODES[mode])
    before, captured = runner.stages.describe(), len(runner.parts.graphs.captured)
    for edit in (
        lambda: runner.stages.replace("sample", 5),  # pyright: ignore[reportArgumentType]
        lambda: runner.stages.replace("nobody", double),
        lambda: runner.stages.insert(None, after="forward"),  # pyright: ignore[reportArgumentType]
        lambda: runner.stages.insert(double),
        lambda: runner.stages.remove("forward"),
        lambda: runner.stages.insert(double, before="sample", after="forward"),
    ):
        with pytest.raises(WiringError):
            edit()
    assert runner.stages.describe() == before
    assert len(runner.parts.graphs.captured) == captured
