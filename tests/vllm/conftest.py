"""Everything in this folder builds vLLM's scheduler, most of it a whole engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Policy references written for the unit tests serve here too.
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))


@pytest.fixture(scope="session")
def hf_model(model_path):
    """Function from an embedded model's name to its Hugging Face form, eager and float32."""
    from vtoken.verify.reference import load_reference

    loaded: dict = {}

    def load(name: str):
        if name not in loaded:
            loaded[name] = load_reference(str(model_path(name)))
        return loaded[name]

    return load
