"""Log-probabilities in OpenAI's two shapes and in vLLM's for prompts.

JSON has no minus infinity, so nothing is below `LOGPROB_FLOOR`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gateway.choices import ChoiceToken
from weir.core.request import TokenLogprobs
from weir.text.detokenizer import Detokenizer
from weir.text.tokenizer import Tokenizer

LOGPROB_FLOOR = -9999.0

Json = dict[str, Any]


def chat_logprobs(tokens: Sequence[ChoiceToken], tokenizer: Tokenizer) -> Json:
    """The `logprobs` of a chat choice."""
    content: list[Json] = []
    for token in tokens:
        if token.logprobs is not None:
            entry = _chat_entry(token.token_id, token.logprobs.logprob, tokenizer)
            tops = zip(token.logprobs.top_token_ids, token.logprobs.top_logprobs, strict=True)
            entry["top_logprobs"] = [_chat_entry(token_id, logprob, tokenizer) for token_id, logprob in tops]
            content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ChoiceToken], tokenizer: Tokenizer, *, base_offset: int = 0) -> Json:
    """The `logprobs` of a completion choice; `base_offset` is the length of an echoed prompt."""
    known = [token for token in tokens if token.logprobs is not None]
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token in known],
        "token_logprobs": [_floored(token.logprobs.logprob) for token in known if token.logprobs],
        "top_logprobs": [_tops_by_text(token.logprobs, tokenizer) for token in known if token.logprobs],
        "text_offset": [base_offset + token.text_offset for token in known],
    }


def echoed_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> Json:
    """The `logprobs` of a prompt that a completion repeats; the first token has none."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offsets: list[int] = []
    offset = 0
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(detokenizer.push_one(token_id))
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id in token_ids],
        "token_logprobs": [None, *(_floored(entry.logprob) for entry in logprobs)],
        "top_logprobs": [None, *(_tops_by_text(entry, tokenizer) for entry in logprobs)],
        "text_offset": offsets,
    }


def joined_logprobs(first: Json, second: Json) -> Json:
    """One `logprobs` of a completion after the other."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: for each prompt token a map from token id, nothing for the first."""
    return [None, *(_by_token_id(entry, tokenizer) for entry in logprobs)]


def _by_token_id(entry: TokenLogprobs, tokenizer: Tokenizer) -> Json:
    ranked = {
        token_id: (logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1)
    }
    ranked[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token_id): {
            "logprob": _floored(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (logprob, rank) in ranked.items()
    }


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> Json:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _floored(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _tops_by_text(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """The most likely tokens and the one that stands there; of two with one text the likelier counts."""
    tops: dict[str, float] = {}
    for token_id, logprob in _tops_and_own(entry):
        tops.setdefault(tokenizer.token_text(token_id), _floored(logprob))
    return tops


def _tops_and_own(entry: TokenLogprobs) -> Iterator[tuple[int, float]]:
    yield from zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    if entry.token_id not in entry.top_token_ids:
        yield entry.token_id, entry.logprob


def _floored(logprob: float) -> float:
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR
