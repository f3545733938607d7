"""The models this gateway serves: card, tokenizer, chat template. Reads prepared model directories, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weir.core.errors import ConfigError, ModelNotFoundError
from weir.core.model_card import ModelCard
from weir.text.chat_template import ChatTemplate
from weir.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What turns requests for one model into token ids and back."""

    card: ModelCard
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @classmethod
    def load(cls, model_dir: Path) -> ServedModel:
        """Read a prepared model directory.

        Raises:
            ModelLoadError: a file is missing or broken; names it.
        """
        tokenizer = Tokenizer.load(model_dir)
        return cls(
            card=ModelCard.load(model_dir),
            tokenizer=tokenizer,
            chat_template=ChatTemplate.load(model_dir, special_tokens=tokenizer.special_tokens),
        )


class ModelStore:
    """Models by name; the first one answers requests that name none."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        """Raises ConfigError when there is no model, or two of one name."""
        self._models = {model.card.name: model for model in models}
        if not models:
            raise ConfigError("models: at least one is needed")
        if len(self._models) < len(models):
            raise ConfigError(f"models: two have one name: {', '.join(model.card.name for model in models)}")

    @classmethod
    def load(cls, model_dirs: Sequence[Path]) -> ModelStore:
        """Raises ModelLoadError or ConfigError as `ServedModel.load` and the constructor do."""
        return cls([ServedModel.load(model_dir) for model_dir in model_dirs])

    @property
    def models(self) -> tuple[ServedModel, ...]:
        return tuple(self._models.values())

    def get(self, name: str | None) -> ServedModel:
        """Raises ModelNotFoundError, which names those that exist."""
        if name is None:
            return next(iter(self._models.values()))
        model = self._models.get(name)
        if model is None:
            raise ModelNotFoundError(
                f"model: {name[:100]!r} is not served here; served: {', '.join(self._models)}", param="model"
            )
        return model
