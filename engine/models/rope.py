"""Rotary position embeddings: frequencies of each scaling scheme, and tables of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from .errors import ModelLoadError, UnsupportedModel

DEFAULT_THETA = 10_000.0
FREQUENCY_FACTORS = "frequency_factors"
"""Rope type of GGUF files with a tensor of divisors, one a frequency (how they store llama3 scaling)."""


@frozen(eq=False)
class RopeParameters:
    """How positions turn into angles; ``values`` hold the parameters of ``rope_type`` by their Hugging Face names."""

    rope_type: str
    theta: float
    head_dim: int
    values: Mapping[str, Any]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> RopeParameters:
        """Read ``rope_parameters`` or the older ``rope_scaling`` and ``rope_theta`` of a ``config.json``.

        Raises:
            UnsupportedModel: an unknown rope type, or rotation of only a part of each head.
            ModelLoadError: a parameter that the rope type needs is missing.
        """
        values: dict[str, Any] = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        rope_type = values.get("rope_type") or values.get("type") or "default"
        theta = values.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
        if rope_type not in _FREQUENCIES:
            known = ", ".join(sorted(_FREQUENCIES.keys() - {FREQUENCY_FACTORS}))
            raise UnsupportedModel(f"rope type {rope_type!r} is not supported; supported: {known}")
        if any(isinstance(value, Mapping) for value in values.values()):
            raise UnsupportedModel(f"rope parameters that differ by layer type are not supported: {sorted(values)}")
        partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported: whole heads are rotated")
        if head_dim % 2:
            raise UnsupportedModel(f"head_dim {head_dim} is odd: rotary embeddings need pairs")
        original = config.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
        values["original_max_position_embeddings"] = original or config["max_position_embeddings"]
        if rope_type == "yarn" and values.get("factor") is None:
            values["factor"] = config["max_position_embeddings"] / values["original_max_position_embeddings"]
        for key in _REQUIRED[rope_type]:
            if values.get(key) is None:
                raise ModelLoadError(f"config: rope type {rope_type!r} needs {key!r}, which is missing")
        return cls(rope_type=rope_type, theta=float(theta), head_dim=head_dim, values=values)

    def inverse_frequencies(self) -> tuple[torch.Tensor, float]:
        """Radians a position for each pair, float32 ``[head_dim / 2]``, and the factor on cosines and sines."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return _FREQUENCIES[self.rope_type](self, 1.0 / (self.theta**exponents))

    def tables(
        self, num_positions: int, *, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines ``[num_positions, head_dim]`` (its halves are equal) and sines ``[num_positions, head_dim / 2]``."""
        inverse_frequencies, factor = self.inverse_frequencies()
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies)
        cosines = angles.cos().mul_(factor).to(device=device, dtype=dtype)
        sines = angles.sin_().mul_(factor).to(device=device, dtype=dtype)
        return torch.cat((cosines, cosines), dim=-1), sines


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + head_dim / 2) of ``heads`` ``[num_tokens, num_heads, head_dim]`` by its angle.

    ``cosines`` are ``[num_tokens, 1, head_dim]``, ``sines`` ``[num_tokens, 1, head_dim / 2]``. Returns a new tensor.
    """
    half = sines.shape[-1]
    rotated = heads * cosines
    rotated[..., :half].addcmul_(heads[..., half:], sines, value=-1)
    rotated[..., half:].addcmul_(heads[..., :half], sines)
    return rotated


def _default(rope: RopeParameters, inverse: torch.Tensor) -> tuple[torch.Tensor, float]:
    return inverse, 1.0


def _linear(rope: RopeParameters, inverse: torch.Tensor) -> tuple[torch.Tensor, float]:
    return inverse / rope.values["factor"], 1.0


def _frequency_factors(rope: RopeParameters, inverse: torch.Tensor) -> tuple[torch.Tensor, float]:
    factors = torch.tensor(rope.values["factors"], dtype=torch.float32)
    if factors.shape != inverse.shape:
        raise ModelLoadError(f"rope_freqs.weight holds {len(factors)} factors, expected {len(inverse)}")
    return inverse / factors, 1.0


def _llama3(rope: RopeParameters, inverse: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long waves are stretched by ``factor``, short ones kept, those between blended."""
    values = rope.values
    factor, low, high = values["factor"], values["low_freq_factor"], values["high_freq_factor"]
    rotations = values["original_max_position_embeddings"] * inverse / (2 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return kept * inverse + (1 - kept) * inverse / factor, 1.0


def _yarn(rope: RopeParameters, inverse: torch.Tensor) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolate slow pairs, keep fast ones, ramp between."""
    values, dim = rope.values, rope.head_dim

    def pair_with(rotations: float) -> float:
        context = values["original_max_position_embeddings"]
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_with(values.get("beta_fast") or 32), pair_with(values.get("beta_slow") or 1)
    if values.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = (last - first) or 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - first) / span).clamp(0.0, 1.0)
    mixed = inverse / values["factor"] * interpolated + inverse * (1 - interpolated)
    return mixed, _yarn_attention_factor(values)


def _yarn_attention_factor(values: Mapping[str, Any]) -> float:
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])

    def magnitude(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(values["factor"]) + 1.0 if values["factor"] > 1 else 1.0

    mscale, mscale_all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


_Frequencies = Callable[[RopeParameters, torch.Tensor], tuple[torch.Tensor, float]]
_FREQUENCIES: Mapping[str, _Frequencies] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    FREQUENCY_FACTORS: _frequency_factors,
}
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    FREQUENCY_FACTORS: ("factors",),
}
