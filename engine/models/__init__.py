"""Models: what they are made of, and small random ones."""

from .decoder import Decoder
from .decoder_config import DecoderConfig
from .errors import ModelLoadError, UnsupportedModel, WeightsError
from .random_model import random_model, tiny_config

__all__ = [
    "Decoder",
    "DecoderConfig",
    "ModelLoadError",
    "UnsupportedModel",
    "WeightsError",
    "random_model",
    "tiny_config",
]
