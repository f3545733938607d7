"""How many tokens requests have: one number, a range, or a long tail."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from weir.core.errors import ConfigError

MAX_TOKENS = 1_000_000
FORMS = "a number of tokens, LOW:HIGH, or lognormal:MEDIAN:SIGMA:MAXIMUM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Uniform from `low` to `high`; with a `sigma` log-normal around `median`, cut off at both ends."""

    low: int
    high: int
    median: int = 0
    sigma: float = 0.0

    @classmethod
    def fixed(cls, num_tokens: int) -> Lengths:
        return cls(low=num_tokens, high=num_tokens)

    @classmethod
    def parse(cls, text: str, *, name: str) -> Lengths:
        """Read one of FORMS. Raises ConfigError that begins with `name`."""
        kind, *numbers = text.split(":") if ":" in text else ("", text, text)
        try:
            if kind == "lognormal":
                median, sigma, high = int(numbers[0]), float(numbers[1]), int(numbers[2])
                lengths = cls(low=1, high=high, median=median, sigma=sigma)
                is_right = len(numbers) == 3 and 1 <= median <= high and math.isfinite(sigma) and sigma > 0
            else:
                low, high = int(kind or numbers[0]), int(numbers[-1])
                lengths = cls(low=low, high=high)
                is_right = text.count(":") <= 1 and 1 <= low <= high
        except (ValueError, IndexError):
            is_right = False
        if not is_right:
            raise ConfigError(f"{name}: {text!r} is not {FORMS}", param=name)
        if lengths.high > MAX_TOKENS:
            raise ConfigError(f"{name}: {text!r} is above the maximum of {MAX_TOKENS:,} tokens", param=name)
        return lengths

    def draw(self, rng: random.Random) -> int:
        if not self.sigma:
            return rng.randint(self.low, self.high)
        drawn = round(rng.lognormvariate(math.log(self.median), self.sigma))
        return min(max(drawn, self.low), self.high)

    def __str__(self) -> str:
        if self.sigma:
            return f"lognormal:{self.median}:{self.sigma:g}:{self.high}"
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"
