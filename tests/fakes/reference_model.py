"""The same checkpoint through transformers, and logits through a runner: the two sides of every equality test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from weir.engine.batch import ScheduledSequence
from weir.engine.model_runner import ModelRunner
from weir.engine.open_weights import open_weights

MAX_RELATIVE_DIFFERENCE = 1e-4


def load_reference(directory: Path) -> Any:
    """The model of a Hugging Face directory, float32, ready to infer."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()


def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position, computed in one pass: [num_tokens, vocab_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)])).logits[0]
    return logits


def stepwise_reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position, one token after the other over transformers' own cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    rows = []
    with torch.inference_mode():
        for token_id in token_ids:
            rows.append(model(input_ids=torch.tensor([[token_id]]), cache=cache, use_cache=True).logits[0, -1])
    return torch.stack(rows)


def largest_difference(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference of any position, each relative to that position's largest logit."""
    return float(((logits - reference).abs().amax(-1) / reference.abs().amax(-1)).max())


class Conversation:
    """Runs sequences through a runner chunk by chunk, each in blocks of its own, in random order.

    Attributes:
        logits: what each sequence has got so far, [num_tokens, vocab_size], on the CPU.
    """

    def __init__(self, runner: ModelRunner, sequences: Sequence[Sequence[int]], seed: int = 0) -> None:
        self._runner = runner
        self._sequences = [tuple(sequence) for sequence in sequences]
        order = torch.randperm(runner.num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        free: Iterator[int] = iter(order)
        self._tables = [[next(free) for _ in range(runner.layout.blocks_for(len(s)))] for s in self._sequences]
        self._computed = [0] * len(sequences)
        self.logits = [torch.empty(0, runner.card.vocab_size) for _ in sequences]

    def step(self, *counts: int) -> None:
        """Compute the next `counts[i]` tokens of sequence i, all in one batch; 0 leaves it out."""
        items, owners = [], []
        for index, count in enumerate(counts):
            start = self._computed[index]
            tokens = self._sequences[index][start : start + count]
            if tokens:
                owners.append(index)
                items.append(
                    ScheduledSequence(
                        sequence_id=str(index),
                        token_ids=tokens,
                        start=start,
                        block_ids=self._tables[index],
                        num_logits=len(tokens),
                    )
                )
        rows = self._runner.execute(items).split([item.num_logits for item in items])
        for index, new in zip(owners, rows, strict=True):
            self.logits[index] = torch.cat((self.logits[index], new.cpu()))
            self._computed[index] += len(new)

    def finish(self, chunk: int) -> list[torch.Tensor]:
        """Compute what is left of every sequence, `chunk` tokens of each a step; all logits."""
        while self._computed != [len(sequence) for sequence in self._sequences]:
            self.step(*[chunk] * len(self._sequences))
        return self.logits


def load_prepared_reference(model_dir: Path) -> Any:
    """The Llama of a prepared directory in transformers, its weights dequantised to float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(model_dir)
    source = open_weights(model_dir)
    tensors = {name: source.read(name).float() for name in source.specs}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()
