"""Two tokenizers small enough to know by heart, one of each family that Weir serves, and a prepared model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gateway.model_store import ServedModel
from weir.core.model_card import CARD_FILE, ModelCard

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_ID = 2
WORDS = ("DEF", "GH", "LM", "OP", "Hello", " there", " world", "中国", " 9", " the", "user", "assistant", "system")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(words: Iterable[str] = WORDS) -> Tokenizer:
    """GPT-2 style: ids 0 to 2 special, 3 to 258 the bytes, then every prefix of `words` as a merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIALS, *alphabet))}
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges = _merges((spell.pre_tokenize_str(word)[0][0] for word in words), vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def sentencepiece(words: Iterable[str] = ("\u2581Hello", "\u2581world", "ing"), *, adds_bos: bool = True) -> Tokenizer:
    """Llama-2 style: ids 0 to 2 special, 3 to 258 `<0x00>` to `<0xFF>`, then characters and merges."""
    vocab = {token: index for index, token in enumerate(("<unk>", "<s>", "</s>"))}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for char in "\u2581abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ":
        vocab.setdefault(char, len(vocab))
    merges = _merges(words, vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def served_model(model_dir: Path, *, name: str = "tiny", max_model_len: int = 256) -> ServedModel:
    """A prepared model directory around `byte_level`, written and loaded."""
    tokenizer = byte_level()
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    card = ModelCard(
        name=name,
        architecture="llama",
        max_model_len=max_model_len,
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        hidden_size=16,
        num_parameters=1000,
        eos_token_ids=(END_ID,),
        bos_token_id=1,
        add_bos_token=False,
        weights_hash="0" * 32,
        created_s=1_700_000_000,
    )
    (model_dir / CARD_FILE).write_text(card.to_json())
    return ServedModel.load(model_dir)


def _merges(spelled: Iterable[str], vocab: dict[str, int]) -> Sequence[tuple[str, str]]:
    """Merges that make each word one token, left to right; adds the new tokens to `vocab`."""
    merges: dict[tuple[str, str], None] = {}
    for word in spelled:
        token = word[0]
        for char in word[1:]:
            merges[(token, char)] = None
            token += char
            vocab.setdefault(token, len(vocab))
    return list(merges)
