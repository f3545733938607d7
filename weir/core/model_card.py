"""What a process must know of a model without loading it.

`weir.engine.prepare` writes the card beside tokenizer.json once; the gateway and the router read it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from weir.core.errors import ModelLoadError
from weir.core.json_fields import value_from_fields

CARD_FILE = "weir_model.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """One model as served.

    Attributes:
        name: what clients put into `model`.
        max_model_len: longest sequence, prompt and output together, in tokens.
        eos_token_ids: ids that end a sequence unless `ignore_eos`.
        bos_token_id: id that the tokenizer puts first when `add_bos_token`.
        weights_hash: hash of the weight files' manifest; equal hash means equal weights.
    """

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos_token: bool
    weights_hash: str
    created_s: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> ModelCard:
        """Of this version or a neighbour; raises ValueError for anything else."""
        return value_from_fields(cls, json.loads(text))

    @classmethod
    def load(cls, model_dir: Path) -> ModelCard:
        """Read the card of a prepared model directory.

        Raises:
            ModelLoadError: the card is missing or not one; names the file.
        """
        path = model_dir / CARD_FILE
        try:
            return cls.from_json(path.read_text())
        except FileNotFoundError as exc:
            raise ModelLoadError(f"{path}: no model card; run `weir model pull` for this model first") from exc
        except ValueError as exc:
            raise ModelLoadError(f"{path}: not a model card of this version: {exc}") from exc
