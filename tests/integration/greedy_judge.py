"""Judges greedy tokens by transformers' logits: right, a tie, or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.fakes.reference_model import MAX_RELATIVE_DIFFERENCE

MAX_TIES = 0.01
"""Share of tokens. More ties than that would make equality say little."""


class GreedyJudge:
    """Follows an answer token by token, each given all before it, in one pass of transformers over the whole.

    By induction every token is the one of a greedy run of transformers, alone and unchunked, up to ties: positions at
    which the two best logits are at most `MAX_RELATIVE_DIFFERENCE` of the largest apart. There the reference is
    made to take the answer's token and goes on.

    Attributes:
        num_tokens, num_ties: judged so far; an answer that is judged again counts again.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._verdicts: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self.num_tokens = 0
        self.num_ties = 0

    def check(self, prompt: Sequence[int], output: Sequence[int], what: str) -> None:
        """Raises AssertionError: `output` is no greedy answer to `prompt`, or there are too many ties."""
        key = (tuple(prompt), tuple(output))
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(*key, what)
        self.num_tokens += len(output)
        self.num_ties += self._verdicts[key]
        assert self.num_ties <= MAX_TIES * self.num_tokens, f"{self.num_ties} ties in {self.num_tokens} tokens"

    def _judge(self, prompt: tuple[int, ...], output: tuple[int, ...], what: str) -> int:
        assert output, f"{what}: no tokens"
        input_ids = torch.tensor([prompt + output[:-1]])
        with torch.inference_mode():
            logits = self._model(input_ids=input_ids, logits_to_keep=len(output)).logits[0]
        best = logits.max(dim=-1)
        given = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        gaps = (best.values - given) / logits.abs().amax(dim=-1)
        for index, gap in enumerate(gaps.tolist()):
            assert gap <= MAX_RELATIVE_DIFFERENCE, (
                f"{what}: token {index} after a prompt of {len(prompt)} is {output[index]}, transformers has "
                f"{int(best.indices[index])}, which is better by {gap:.1e} of the largest logit"
            )
        return int((best.indices != torch.tensor(output)).sum())
