"""Building blocks of the request models: strictness, and the values that are more than one JSON type.

`null` means "not given" at every level; an unknown field is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from weir.text.chat_template import join_parts

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 100.0

Prompt = str | tuple[int, ...]
"""One prompt of a completion: text, or token ids."""


def refuse(message: str, *, at: str = "") -> PydanticCustomError:
    """A fault of the value at hand, in our words; `at` is the field or `[index]` inside it."""
    return PydanticCustomError("invalid_request", "{text}", {"text": message, "at": at})


def refuse_feature(reason: str, *, at: str = "") -> PydanticCustomError:
    """A field or value that Weir knows and does not serve; `at` as in `refuse`."""
    return PydanticCustomError("unsupported_feature", "{text}", {"text": reason, "at": at})


class StrictModel(BaseModel):
    """No coercion, no unknown field, `null` is "not given".

    `refused` names the fields that are known and not served, with the reason that the client reads.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if value is not None}
        for name, reason in cls.refused.items():
            if name in given:
                raise refuse_feature(f"not supported: {reason}", at=name)
        return given


def _is_ids(value: list[Any]) -> bool:
    return set(map(type, value)) == {int}


def _prompts(value: Any) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise refuse("must be a string, a list of token ids, or a list of either")
    if not value:
        raise refuse("must not be an empty list")
    if _is_ids(value):
        return (tuple(value),)
    kinds = set(map(type, value))
    if kinds == {str}:
        return tuple(value)
    if kinds != {list}:
        raise refuse("must hold strings only, token ids only, or lists of token ids only")
    for index, ids in enumerate(value):
        if not ids:
            raise refuse("must not be an empty list", at=f"[{index}]")
        if not _is_ids(ids):
            raise refuse("must hold token ids only", at=f"[{index}]")
    return tuple(map(tuple, value))


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise refuse("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise refuse(f"must hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARS:
            raise refuse(f"a stop string must have 1 to {MAX_STOP_CHARS} characters, got {len(string)}")
    return tuple(dict.fromkeys(strings))


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and word.strip() for word in value):
        raise refuse("must be a list of strings that are not blank")
    if len(value) > MAX_BAD_WORDS:
        raise refuse(f"must hold at most {MAX_BAD_WORDS} words, got {len(value)}")
    return tuple(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or (value and not _is_ids(value)):
        raise refuse("must be a list of token ids")
    return tuple(dict.fromkeys(value))


def _some_token_ids(value: Any) -> tuple[int, ...]:
    ids = _token_ids(value)
    if not ids:
        raise refuse("must not be an empty list: it would allow no token at all")
    return ids


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise refuse("must be an object of token id to number")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise refuse(f"must have token ids as keys, got {key[:40]!r}", at=key[:40])
        if type(bias) not in (int, float) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            limits = f"{-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            raise refuse(f"must be a number from {limits}, got {str(bias)[:40]}", at=key)
        if int(key) in biases:
            raise refuse("names the same token id twice", at=key)
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def _content(value: Any) -> str:
    """The text of a message: a string, or text parts that are joined with a newline."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse("must be a string or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None and not isinstance(kind, str):
            raise refuse("type must be a string", at=f"[{index}]")
        if kind is not None and kind != "text":
            raise refuse_feature(
                f"type {kind[:40]!r}: not supported: the models served read text only", at=f"[{index}]"
            )
        if kind is None or set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise refuse('must be {"type": "text", "text": a string}', at=f"[{index}]")
        texts.append(part["text"])
    return join_parts(texts)


_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_STRINGS = {"type": "array", "items": {"type": "string"}}

PromptsField = Annotated[
    tuple[Prompt, ...],
    BeforeValidator(_prompts),
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _INTEGERS, {"type": "array", "items": _INTEGERS}]}),
]
StopField = Annotated[
    tuple[str, ...], BeforeValidator(_stop), WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS]})
]
WordsField = Annotated[tuple[str, ...], BeforeValidator(_words), WithJsonSchema(_STRINGS)]
TokenIdsField = Annotated[tuple[int, ...], BeforeValidator(_token_ids), WithJsonSchema(_INTEGERS)]
SomeTokenIdsField = Annotated[
    tuple[int, ...], BeforeValidator(_some_token_ids), WithJsonSchema({**_INTEGERS, "minItems": 1})
]
LogitBiasField = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
ContentField = Annotated[
    str,
    BeforeValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
