"""How many tokens requests have: one number, a range, or a long tail."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from weir.core.errors import ConfigError

MAX_TOKENS = 1_000_000
MAX_SIGMA = 10.0
FORMS = (
    f"a number of tokens, LOW:HIGH, or lognormal:MEDIAN:SIGMA:MAXIMUM, tokens from 1 to {MAX_TOKENS:,}, "
    f"SIGMA above 0 and up to {MAX_SIGMA:g}"
)


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
        parts = text.split(":")
        try:
            if parts[0] == "lognormal":
                _, median, sigma, high = parts
                lengths = cls(low=1, high=int(high), median=int(median), sigma=float(sigma))
                is_right = 1 <= lengths.median <= lengths.high and 0 < lengths.sigma <= MAX_SIGMA
            else:
                low, high = parts if len(parts) > 1 else parts * 2
                lengths = cls(low=int(low), high=int(high))
                is_right = 1 <= lengths.low <= lengths.high
        except ValueError:
            is_right = False
        if not is_right or lengths.high > MAX_TOKENS:
            raise ConfigError(f"{name}: {text!r} is not {FORMS}", param=name)
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
