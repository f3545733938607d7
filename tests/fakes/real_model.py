"""SmolLM2-135M-Instruct, prepared once a machine: downloaded on first use, found again in 0.2 s after that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weir.engine.prepare import DEFAULT_HOME, prepare


def prepare_real_model() -> Path:
    """The prepared directory, in `WEIR_TEST_HOME` or where `weir.engine.prepare` keeps models."""
    return prepare("smollm2", home=Path(os.environ.get("WEIR_TEST_HOME", DEFAULT_HOME)))


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    """The default model, prepared; read-only."""
    return prepare_real_model()
