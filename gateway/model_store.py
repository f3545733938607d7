"""The models this gateway serves: card, tokenizer, chat template. Reads prepared model directories, no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weir.core.errors import ConfigError, ModelNotFoundError
from weir.core.model_card import ModelCard
from weir.text.chat_template import ChatTemplate
from weir.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What turns requests for one model into token ids and back.

    Attributes:
        workers_limit: longest sequence that every worker of the model takes; None while there is none.
    """

    card: ModelCard
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    workers_limit: int | None = None

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens: the model's own, unless its workers take less."""
        own = self.card.max_model_len
        return own if self.workers_limit is None else min(own, self.workers_limit)

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
    """Models by name; the first one answers requests that name none.

    Args:
        workers_limit: the longest sequence that all workers of a model take now, None without a worker.
    """

    def __init__(
        self, models: Sequence[ServedModel], *, workers_limit: Callable[[str], int | None] = lambda name: None
    ) -> None:
        """Raises ConfigError when there is no model, or two of one name."""
        self._models = {model.card.name: model for model in models}
        self._workers_limit = workers_limit
        if not models:
            raise ConfigError("models: at least one is needed")
        if len(self._models) < len(models):
            raise ConfigError(f"models: two have one name: {', '.join(model.card.name for model in models)}")

    @property
    def models(self) -> tuple[ServedModel, ...]:
        return tuple(map(self.get, self._models))

    def get(self, name: str | None) -> ServedModel:
        """Raises ModelNotFoundError, which names those that exist."""
        if name is None:
            name = next(iter(self._models))
        model = self._models.get(name)
        if model is None:
            raise ModelNotFoundError(
                f"model: {name[:100]!r} is not served here; served: {', '.join(self._models)}", param="model"
            )
        return replace(model, workers_limit=self._workers_limit(model.card.name))
