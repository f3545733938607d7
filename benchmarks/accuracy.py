"""How far each way of storing weights and KV is from the same model in float32 transformers.

    python -m benchmarks.accuracy [--tokens 20000] [--model-dir DIR]

Real text, the reference that Python ships with its help, in windows of 512 tokens; every position of every window
counts. Printed for each way: the mean Kullback-Leibler divergence from the reference's distribution of the next token,
and how often the most likely token is the same one.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tests.fakes.real_model import prepare_real_model
from tests.fakes.reference_model import Conversation, load_prepared_reference
from weir.engine.config import EngineConfig
from weir.engine.model_runner import ModelRunner

WINDOW = 512
WAYS: dict[str, dict[str, str]] = {
    "float32": {},
    "float32, float16 KV": {"kv_cache_dtype": "float16"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "auto": {"quantization": "auto"},
    "auto, float32 KV": {"quantization": "auto", "kv_cache_dtype": "float32"},
    "auto, int8 KV": {"quantization": "auto", "kv_cache_dtype": "int8"},
}


def windows_of(model_dir: Path, num_tokens: int) -> list[list[int]]:
    """Whole windows of the text, as token ids."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    count = min(num_tokens, len(ids)) // WINDOW
    return [ids[index * WINDOW : (index + 1) * WINDOW] for index in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--model-dir", type=Path, help="a prepared model (default: SmolLM2-135M-Instruct)")
    arguments = parser.parse_args()
    model_dir = arguments.model_dir or prepare_real_model()
    windows = windows_of(model_dir, arguments.tokens)
    reference = load_prepared_reference(model_dir)
    runners = {
        name: ModelRunner(
            EngineConfig(model_dir=model_dir, max_model_len=WINDOW, max_num_batched_tokens=WINDOW, num_blocks=64, **way)
        )
        for name, way in WAYS.items()
    }
    divergence = dict.fromkeys(WAYS, 0.0)
    agreed = dict.fromkeys(WAYS, 0)
    for window in windows:
        with torch.inference_mode():
            expected = torch.log_softmax(reference(torch.tensor([window])).logits[0].float(), dim=-1)
        for name, runner in runners.items():
            found = torch.log_softmax(Conversation(runner, [window]).finish(WINDOW)[0], dim=-1)
            divergence[name] += float((expected.exp() * (expected - found)).sum())
            agreed[name] += int((expected.argmax(-1) == found.argmax(-1)).sum())
    num_tokens = len(windows) * WINDOW
    print(f"{num_tokens} tokens of Python's help topics, windows of {WINDOW}\n")
    print("| weights | KL divergence | same most likely token |")
    print("| --- | --- | --- |")
    for name in WAYS:
        print(f"| {name} | {divergence[name] / num_tokens:.2e} | {100 * agreed[name] / num_tokens:.2f} % |")


if __name__ == "__main__":
    main()
