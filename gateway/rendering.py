"""What completions and chats share in writing answers: the frame around choices, usage, text as JSON.

Chunks of a running stream are put together from strings made once, since each token passes here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from gateway.choices import ChoiceDelta
from gateway.generation import Generation, Usage
from gateway.model_store import ServedModel
from gateway.openai_api import GenerationRequest
from gateway.prompts import PreparedPrompt

Json = dict[str, Any]

text_to_json: Callable[[str], str] = encode_basestring_ascii
"""A JSON string in ASCII: no reader of lines can find a line's end in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an answer is made of, beside the tokens.

    Attributes:
        answer_id: the `id` that the client sees.
        created_s: when it was made, in Unix time.
    """

    answer_id: str
    created_s: int
    model: ServedModel
    prompts: Sequence[PreparedPrompt]
    generation: Generation

    def head(self, kind: str) -> Json:
        """The fields that every object about this answer starts with."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model.card.name,
        }


class Rendering(Protocol):
    """Writes the answers of one endpoint."""

    def opening(self, index: int) -> str:
        """The events that come before the first delta of a choice; may be empty."""

    def event(self, delta: ChoiceDelta) -> str:
        """The event of one delta."""

    def usage_event(self) -> str:
        """The event with the final counts and no choice."""

    def body(self, choices: Sequence[ChoiceDelta]) -> Json:
        """The answer as a whole; each choice as one delta."""


class ChunkFrame:
    """The strings around the choices of every chunk of one stream."""

    def __init__(self, answer: Answer, request: GenerationRequest, kind: str) -> None:
        self._generation = answer.generation
        self._has_usage = request.includes_usage
        self._has_usage_in_each = request.has_usage_in_each_chunk
        self._head = f"data: {compact(answer.head(kind))[:-1]}"
        self._plain_tail = ',"usage":null}\n\n' if self._has_usage else "}\n\n"
        self.choice_head = f'{self._head},"choices":[{{"index":'

    @property
    def tail(self) -> str:
        """What closes a chunk after its choices; `usage` is null unless every chunk has it."""
        if not self._has_usage_in_each:
            return self._plain_tail
        return f',"usage":{compact(usage_fields(self._generation.usage))}}}\n\n'

    def chunk(self, choice: Json, extra: Json | None = None) -> str:
        """The event of one choice, with `extra` fields beside the choices."""
        beside = f",{compact(extra)[1:-1]}" if extra else ""
        return f'{self._head},"choices":[{compact(choice)}]{beside}{self.tail}'

    def usage_event(self) -> str:
        """Empty choices and the final counts, if the client asked."""
        if not self._has_usage:
            return ""
        return f'{self._head},"choices":[],"usage":{compact(usage_fields(self._generation.usage))}}}\n\n'


def usage_fields(usage: Usage) -> Json:
    """`usage` as OpenAI writes it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def compact(value: Any) -> str:
    """Strict JSON on one line of ASCII."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
