"""Prompts of every length that matters, in the tokens of the default model: half of them text, half without sense."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from tests.integration.engines import prompt_of

TEXT = Path(__file__).parents[2] / "LICENSE"

SHORT_LENGTHS = (1, 2, 15, 16, 17, 33, 254, 255)
"""Around the edges of blocks; two answers soon grow beyond a block of 256."""

LONG_LENGTHS = (510, 2000)

ALL_LENGTHS = (
    *(1, 2, 3, 4, 5, 7, 9, 12, 15, 16, 17, 20, 24, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 80, 95, 100, 111, 127, 128),
    *(129, 144, 160, 180, 200, 225, 252, 254, 255, 256, 257, 320, 400, 500, 508, 510, 512, 640, 800, 1021, 2000),
)


class PromptSet:
    """Makes prompts that share no prefix, not even of one token, so that a cache has of each what that one left."""

    def __init__(self, model_dir: Path) -> None:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._vocab_size = tokenizer.get_vocab_size()
        self._text = tuple(tokenizer.encode(TEXT.read_text()).ids)

    def of(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """One prompt for each length, always the same."""
        prompts = []
        for index, length in enumerate(lengths):
            start = 31 * index % (len(self._text) - length + 1)
            text = self._text[start : start + length]
            body = text if index % 2 else prompt_of(length, seed=index, vocab_size=self._vocab_size)
            prompts.append((1000 + index, *body[1:]))
        return prompts
