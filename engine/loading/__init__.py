"""Loading models: folders, GGUF files, the packaged model, the hub."""

from .loader import LoadedModel, load_model, read_spec
from .sources import open_checkpoint

__all__ = ["LoadedModel", "load_model", "open_checkpoint", "read_spec"]
