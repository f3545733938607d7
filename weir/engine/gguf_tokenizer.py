"""Building a tokenizer.json out of the vocabulary that a GGUF file carries.

Two kinds: byte-level BPE ("gpt2": vocabulary, merges and the name of a pre-tokenizer) and SentencePiece BPE ("llama":
vocabulary and scores, from which the merges follow). Control and user-defined tokens become added tokens, so that
text never splits them.

Source: llama.cpp, src/llama-vocab.cpp (pre-tokenizer expressions); Kudo and Richardson 2018, SentencePiece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from weir.core.errors import ModelLoadError

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "default": (_GPT2_SPLIT,),
    "gpt-2": (_GPT2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "llama3": (_LLAMA3_SPLIT,),
    "llama-v3": (_LLAMA3_SPLIT,),
    "smaug-bpe": (_LLAMA3_SPLIT,),
    "qwen2": (_QWEN2_SPLIT,),
    "deepseek-r1-qwen": (_QWEN2_SPLIT,),
    "tekken": (_TEKKEN_SPLIT,),
}
_IGNORES_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""A word that is in the vocabulary as a whole is that token, whatever its merges say."""


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that `metadata` of the GGUF file `path` describes.

    Raises:
        ModelLoadError: there is none, or one of a kind that is not known; names the file and the key.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, path)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, path)
    else:
        raise ModelLoadError(f"{path}: tokenizer.ggml.model is {kind!r}; supported are 'gpt2' and 'llama'")
    _add_tokens(tokenizer, metadata)
    _add_bos(tokenizer, metadata)
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer_config.json beside it: special tokens by name, and the chat template where there is one."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{name}_token"] = None if token_id is None else tokens[token_id]
    config["add_bos_token"] = adds_bos(metadata)
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a text starts with the bos token; a file that does not say so means yes for SentencePiece alone."""
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece))


def _byte_level(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in _SPLITS:
        known = ", ".join(sorted(_SPLITS))
        raise ModelLoadError(f"{path}: tokenizer.ggml.pre is {pre!r}, which is not supported; supported are {known}")
    vocabulary = _vocabulary(metadata, path)
    merges = [tuple(merge.split(" ", 1)) for merge in _get(metadata, "merges", path)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _IGNORES_MERGES))
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    vocabulary = _vocabulary(metadata, path)
    scores = dict(zip(_get(metadata, "tokens", path), _get(metadata, "scores", path), strict=True))
    unknown = _get(metadata, "tokens", path)[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    bpe = models.BPE(
        vocab=vocabulary, merges=_merges(vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prepend = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    spaces = decoders.Replace(_SPACE, " ")
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """SentencePiece joins, at each step, the neighbours whose union scores best: the merges in the order of that."""

    def pairs() -> Iterator[tuple[float, int, int, str, str]]:
        for piece, score in scores.items():
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in vocabulary and right in vocabulary:
                    yield -score, vocabulary[left], vocabulary[right], left, right

    return [(left, right) for *_, left, right in sorted(pairs())]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    user = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])


def _add_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if bos_id is None or not adds_bos(metadata):
        return
    bos = metadata["tokenizer.ggml.tokens"][bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )


def _vocabulary(metadata: Mapping[str, Any], path: Path) -> dict[str, int]:
    tokens = _get(metadata, "tokens", path)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelLoadError(f"{path}: tokenizer.ggml.tokens has the same token twice")
    return vocabulary


def _get(metadata: Mapping[str, Any], key: str, path: Path) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise ModelLoadError(f"{path}: the tokenizer is missing: metadata has no tokenizer.ggml.{key}")
    return value
