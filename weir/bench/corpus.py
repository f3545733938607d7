"""Real text to make prompts of: the help topics that Python ships, or a file."""

from __future__ import annotations

import random
from pathlib import Path

from weir.core.errors import ConfigError

MIN_WORDS = 256
MAX_WORD_CHARS = 16
OPENING_WORDS = 6
"""Two prompts begin with the same six of some ten thousand words once in 10^24 draws."""


class Corpus:
    """A text without line breaks, read in a circle from wherever a draw begins."""

    def __init__(self, text: str, *, name: str) -> None:
        """Raises ConfigError when the text has too few different words to tell prompts apart."""
        self._text = " ".join(text.split())
        self._words = sorted({word[:MAX_WORD_CHARS] for word in self._text.split(" ")})
        if len(self._words) < MIN_WORDS:
            raise ConfigError(
                f"text_file: {name} has {len(self._words)} different words; at least {MIN_WORDS} are needed",
                param="text_file",
            )

    @classmethod
    def load(cls, path: Path | None) -> Corpus:
        """Raises ConfigError when the file cannot be read as text."""
        if path is None:
            from pydoc_data.topics import topics

            return cls("\n".join(topics[name] for name in sorted(topics)), name="Python's help")
        try:
            return cls(path.read_text(encoding="utf-8"), name=str(path))
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"text_file: {path} cannot be read: {exc}", param="text_file") from exc

    def draw(self, rng: random.Random, num_chars: int) -> str:
        """A few words of anywhere, by which the text is told from all others, then `num_chars` from one place on."""
        opening = " ".join(rng.choice(self._words) for _ in range(OPENING_WORDS))
        place = rng.randrange(len(self._text))
        start = self._text.find(" ", place) + 1  # 0 after the last blank
        pieces = [opening, self._text[start : start + num_chars]]
        missing = num_chars - len(pieces[-1])
        while missing > 0:
            pieces.append(self._text[:missing])
            missing -= len(pieces[-1])
        return " ".join(pieces)
