"""SmolLM2-135M-Instruct: its tokenizer, its logits beside transformers', and what it is known to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from tests.fakes.reference_model import (
    MAX_RELATIVE_DIFFERENCE,
    Conversation,
    largest_difference,
    load_prepared_reference,
    reference_logits,
)
from weir.core.model_card import ModelCard
from weir.engine.batch import ScheduledSequence
from weir.engine.config import EngineConfig
from weir.engine.model_runner import ModelRunner

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer(real_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def runner(real_model_dir: Path) -> ModelRunner:
    return ModelRunner(EngineConfig(model_dir=real_model_dir))


@pytest.fixture(scope="module")
def reference(real_model_dir: Path) -> Any:
    return load_prepared_reference(real_model_dir)


def chat(real_model_dir: Path, message: str) -> str:
    template = json.loads((real_model_dir / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "user", "content": message}]
    return jinja2.Environment().from_string(template).render(messages=messages, add_generation_prompt=True)


def greedy(runner: ModelRunner, prompt: list[int], num_tokens: int) -> list[int]:
    """The most likely continuation, up to an end token."""
    tokens, start = list(prompt), 0
    blocks = range(runner.layout.blocks_for(len(prompt) + num_tokens))
    while len(tokens) < len(prompt) + num_tokens:
        new = tuple(tokens[start:])
        item = ScheduledSequence(sequence_id="a", token_ids=new, start=start, block_ids=blocks, num_logits=1)
        start = len(tokens)
        tokens.append(int(runner.execute([item])[0].argmax()))
        if tokens[-1] in runner.card.eos_token_ids:
            break
    return tokens[len(prompt) :]


def varied(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(17, 49152, (length,), generator=generator).tolist()


def test_the_card_has_the_known_facts(real_model_dir: Path) -> None:
    card = ModelCard.load(real_model_dir)
    assert card.name == "SmolLM2-135M-Instruct"
    assert (card.vocab_size, card.max_model_len) == (49152, 8192)
    assert (card.num_layers, card.num_heads, card.num_kv_heads, card.head_dim) == (30, 9, 3, 64)
    assert card.num_parameters == 134_515_008
    assert card.eos_token_ids == (2,)
    assert (card.bos_token_id, card.add_bos_token) == (1, False)


@pytest.mark.parametrize(
    ("text", "token_ids"),
    [
        (" the", [260]),
        ("😀", [10813, 242, 218]),
        ("\n", [198]),
        (" ", [216]),
        ("<|endoftext|><|im_start|><|im_end|>", [0, 1, 2]),
        ("", []),
    ],
)
def test_known_tokens(tokenizer: Tokenizer, text: str, token_ids: list[int]) -> None:
    assert tokenizer.encode(text).ids == token_ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("character", ["\u0004", "\u0006", "\u0013", "\u0014", "\u0016", "\u001d"])
def test_characters_outside_the_vocabulary_vanish(tokenizer: Tokenizer, character: str) -> None:
    assert tokenizer.encode(f"a{character}b").ids == tokenizer.encode("a").ids + tokenizer.encode("b").ids


@pytest.mark.parametrize(("message", "num_tokens"), [("hi", 31), ("hi hi", 32), ("hi hi hi", 33)])
def test_chat_prompts_have_their_known_lengths(
    real_model_dir: Path, tokenizer: Tokenizer, message: str, num_tokens: int
) -> None:
    assert len(tokenizer.encode(chat(real_model_dir, message)).ids) == num_tokens


def test_known_continuations(real_model_dir: Path, tokenizer: Tokenizer, runner: ModelRunner) -> None:
    def say(prompt: str, num_tokens: int) -> str:
        return tokenizer.decode(greedy(runner, tokenizer.encode(prompt).ids, num_tokens))

    assert say("Here is the English alphabet: ABC", 20).startswith("DEFGHIJKLMNOPQRSTUVWXYZ")
    assert say("鼠标 中国 鼠标 中国 鼠标", 24) == " 中国 鼠标 中国 鼠标 中国 鼠标"
    assert say("1, 2, 3, 4, 5,", 20).startswith(" 6, 7, 8, 9, 10, 11, 12,"[:20])
    assert say("ha ha ha ha", 6) == " ha ha hah ha ha"
    assert say(chat(real_model_dir, "hi"), 30) == "Hello there! How can I assist you today?"


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_logits_equal_transformers_in_mixed_chunked_batches(
    real_model_dir: Path, reference: Any, block_size: int
) -> None:
    config = EngineConfig(model_dir=real_model_dir, block_size=block_size, max_model_len=512)
    prompts = [varied(length, seed) for seed, length in enumerate((90, 1, 33, 17))]
    conversation = Conversation(ModelRunner(config), prompts)
    conversation.step(40, 1, 0, 5)
    conversation.step(1, 0, 33, 1)
    conversation.step(1, 0, 0, 1)
    for prompt, logits in zip(prompts, conversation.finish(37), strict=True):
        expected = reference_logits(reference, prompt)
        assert largest_difference(logits, expected) <= MAX_RELATIVE_DIFFERENCE
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.full
@pytest.mark.parametrize("length", [2000])
@pytest.mark.parametrize("chunk", [100, 256])
def test_long_contexts_equal_transformers(runner: ModelRunner, reference: Any, length: int, chunk: int) -> None:
    prompt = varied(length, 9)
    expected = reference_logits(reference, prompt)
    assert largest_difference(Conversation(runner, [prompt]).finish(chunk)[0], expected) <= MAX_RELATIVE_DIFFERENCE
