"""The engine's logits and greedy tokens beside those of transformers on the same device, on small random models.

In bfloat16 two programs that are both right differ, and how much is not known beforehand. So both are held against
transformers in float32: Weir may be twice as far from it as transformers itself in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.gpu_record import Row
from benchmarks.gpu_section import Begun, Message, Situation
from tests.fakes.reference_model import Conversation
from tests.fakes.tiny_model import write_tiny_model
from tests.kernels.paged_pool import rms_ratio
from weir.engine.config import EngineConfig
from weir.engine.model_runner import ModelRunner
from weir.engine.prepare import prepare

SECTION = "equality"
FLOAT32_TOLERANCE = 1e-4
MAX_TIMES = 2.0
CLEAR_MARGIN = 8.0
"""Times the root-mean-square difference of logits: further apart than this the best two tokens can't change places."""
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualityCase:
    """One model and its sequences.

    Attributes:
        lengths: of the sequences; the last `num_decoded` tokens of each are computed one a step, all before in chunks.
    """

    family: str
    dtype: torch.dtype
    lengths: tuple[int, ...] = (700, 40, 301, 64)
    chunk: int = 256
    num_decoded: int = 24
    sizes: dict[str, int] = field(default_factory=lambda: SIZES)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


CASES = (
    EqualityCase(family="llama", dtype=torch.bfloat16),
    EqualityCase(family="qwen3", dtype=torch.bfloat16),
    EqualityCase(family="qwen3_moe", dtype=torch.float32),
)


def measure(situation: Situation) -> Iterator[Message]:
    logging.disable_progress_bar()
    for case in CASES:
        if situation.is_dry:
            case = EqualityCase(family=case.family, dtype=case.dtype, lengths=(21, 9), chunk=8, num_decoded=3, sizes={})
        yield Begun(f"{case.family} in {case.dtype_name}")
        yield from compare(case, situation)


def compare(case: EqualityCase, situation: Situation) -> Iterator[Row]:
    device = torch.device(situation.device)
    source = situation.scratch / f"equal-{case.family}"
    write_tiny_model(source, case.family, dtype=case.dtype, **case.sizes)
    model_dir = prepare(str(source), output=situation.scratch / f"equal-{case.family}-prepared")
    runner = ModelRunner(
        EngineConfig(
            model_dir=model_dir,
            device=situation.device,
            dtype=case.dtype_name,
            num_blocks=256,
            max_num_seqs=8,
            max_num_batched_tokens=sum(case.lengths),
            max_model_len=1024,
            device_claim_dir=situation.scratch / "devices",
            kernel_cache_dir=None,
        )
    )
    generator = torch.Generator().manual_seed(0)
    vocab_size = runner.card.vocab_size
    sequences = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in case.lengths]
    own = torch.cat(weir_logits(runner, sequences, case))
    exact = torch.cat(transformers_logits(source, sequences, torch.float32, device))
    theirs = torch.cat(transformers_logits(source, sequences, case.dtype, device))
    shape = f"{len(exact)} positions of {len(sequences)} sequences, {case.num_decoded} of each decoded one by one"
    name = f"{case.family} in {case.dtype_name}"
    yield Row(
        section=SECTION,
        name=f"{name}, logits",
        shape=shape,
        error=rms_ratio(own, exact),
        tolerance=max(FLOAT32_TOLERANCE, MAX_TIMES * rms_ratio(theirs, exact)),
    )
    num_clear, num_wrong = count_wrong_tokens(own, exact)
    yield Row(
        section=SECTION,
        name=f"{name}, greedy tokens",
        shape=shape,
        error=num_wrong / max(1, num_clear),
        tolerance=0.0,
        remark=f"{num_clear} of {len(exact)} tokens have a clear margin",
    )


def weir_logits(runner: ModelRunner, sequences: list[list[int]], case: EqualityCase) -> list[torch.Tensor]:
    """Of every position, all sequences side by side."""
    conversation = Conversation(runner, sequences)
    left = [len(sequence) - case.num_decoded for sequence in sequences]
    while any(left):
        counts = [min(case.chunk, count) for count in left]
        conversation.step(*counts)
        left = [count - done for count, done in zip(left, counts, strict=True)]
    return conversation.finish(1)


def transformers_logits(
    source: Path, sequences: list[list[int]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Of every position, one sequence after the other, on the CPU."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True).to(device).eval()
    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([sequence], device=device)).logits[0].float().cpu() for sequence in sequences
        ]


def count_wrong_tokens(own: torch.Tensor, exact: torch.Tensor) -> tuple[int, int]:
    """How many positions have a best token by a clear margin, and at how many of those ours is another."""
    best_two = exact.topk(2).values
    is_clear = best_two[:, 0] - best_two[:, 1] > CLEAR_MARGIN * (own - exact).square().mean().sqrt()
    is_wrong = own.argmax(-1) != exact.argmax(-1)
    return int(is_clear.sum()), int((is_clear & is_wrong).sum())
