"""A tiny random model and what it gives to each request alone, remembered for the whole session."""

from __future__ import annotations

import pytest
from reference import References
from twostroke.engine.models.random_model import random_model, tiny_config


@pytest.fixture(scope="session")
def references() -> References:
    """Over a model of two layers, float32."""
    return References(random_model(tiny_config()))
