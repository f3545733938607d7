from __future__ import annotations

import json
from pathlib import Path

import pytest

from weir.core.errors import ModelLoadError
from weir.core.model_card import CARD_FILE, ModelCard

CARD = ModelCard(
    name="tiny",
    architecture="LlamaForCausalLM",
    max_model_len=64,
    vocab_size=100,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    num_parameters=1000,
    eos_token_ids=(2, 3),
    bos_token_id=None,
    add_bos_token=False,
    weights_hash="ab",
    created_s=1,
)


def test_a_card_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / CARD_FILE).write_text(CARD.to_json())
    assert ModelCard.load(tmp_path) == CARD


def test_a_missing_card_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"{CARD_FILE}: no model card; run `weir model pull`"):
        ModelCard.load(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", json.dumps(json.loads(CARD.to_json()) | {"eos_token_ids": 1})])
def test_a_broken_card_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / CARD_FILE).write_text(text)
    with pytest.raises(ModelLoadError, match=f"{CARD_FILE}: not a model card"):
        ModelCard.load(tmp_path)


def test_a_card_of_a_later_version_is_read(tmp_path: Path) -> None:
    (tmp_path / CARD_FILE).write_text(json.dumps(json.loads(CARD.to_json()) | {"rope": {"kind": "later"}}))
    assert ModelCard.load(tmp_path) == CARD
