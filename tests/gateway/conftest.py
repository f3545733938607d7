"""A tiny model for the tests of this folder."""

from __future__ import annotations

import pytest

from gateway.model_store import ModelStore, ServedModel
from tests.fakes.tiny_tokenizer import served_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """`tests.fakes.tiny_tokenizer.served_model`: context 256."""
    return served_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def models(model: ServedModel) -> ModelStore:
    return ModelStore([model])
