"""Environment and fixtures for all tests. It runs before any test imports torch or vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tests run tiny models in one process: threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# It keeps a compiled matrix product for each of the last 1,024 numbers of tokens in a step; the
# soak must not take that for a leak.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
# Output is as wide as where there is no terminal; test workers set this to their own.
os.environ.pop("COLUMNS", None)
# The command line must not replace the process that runs the tests.
os.environ["VTOKEN_NO_REEXEC"] = "1"

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of recorded data sets; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("VTOKEN_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}; set VTOKEN_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def model_path():
    """Function from an embedded model's name to its folder; prepares it where it is missing."""
    from vtoken.models import prepare

    return prepare
