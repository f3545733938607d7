"""The requests of OpenAI's interface as Weir serves them, with the fields that vLLM adds.

Defaults and refusals are listed in docs/http_api.md. What needs the model to be checked (vocabulary, context) is
checked in `prompts` and `sampling`; everything else here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gateway.openai_fields import (
    ContentField,
    LogitBiasField,
    PromptsField,
    SomeTokenIdsField,
    StopField,
    StrictModel,
    TokenIdsField,
    WordsField,
    refuse,
    refuse_feature,
)

MAX_N = 128
DEFAULT_MAX_TOKENS = 16
"""Of a completion that names no limit, as in OpenAI's interface; a chat may fill the context."""

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
MAX_LABEL_CHARS = 256

_NO_CONSTRAINTS = "output can't be constrained to a form yet"
_NO_TOOLS = "tool calls are not produced yet"
_NO_KV_KNOBS = "Weir moves the KV cache itself; clients have no part in it"

Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]


class StreamOptions(StrictModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(StrictModel):
    """Only `text`, which is the default."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, fields: Any) -> Any:
        kind = fields.get("type") if isinstance(fields, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise refuse_feature(f"{kind[:40]!r}: not supported: {_NO_CONSTRAINTS}", at="type")
        return fields


class ModelRequest(StrictModel):
    """What every request to a model has. Without `model` the first one served answers."""

    model: str | None = None


class GenerationRequest(ModelRequest):
    """The fields that completions and chats share."""

    refused: ClassVar[Mapping[str, str]] = {
        "structured_outputs": _NO_CONSTRAINTS,
        "kv_transfer_params": _NO_KV_KNOBS,
        "reasoning_effort": "the models served have no such control",
    }

    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31 - 1)
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: LogitBiasField = ()
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    n: int = Field(1, ge=1, le=MAX_N)
    best_of: int | None = None
    stop: StopField = ()
    stop_token_ids: TokenIdsField = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: WordsField = ()
    allowed_token_ids: SomeTokenIdsField | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    echo: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    cache_salt: Label = ""
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    request_id: Label | None = None
    session_id: Label | None = None
    user: Label | None = None

    @property
    def asked_max_tokens(self) -> int | None:
        """The limit the client named, or None."""
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_usage_in_each_chunk(self) -> bool:
        return self.includes_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("is only allowed with stream true", at="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise refuse("is only allowed with stream false", at="prompt_logprobs")
        if self.best_of is not None and self.best_of != self.n:
            raise refuse_feature(
                f"not supported unless it equals n: Weir returns every choice it computes; got {self.best_of} with n "
                f"{self.n}",
                at="best_of",
            )
        limit = self.asked_max_tokens
        if limit is not None and self.min_tokens > limit:
            raise refuse(f"must be at most max_tokens, which is {limit}, got {self.min_tokens}", at="min_tokens")
        if self.truncate_prompt_tokens == 0:
            raise refuse("must be -1 or at least 1, got 0", at="truncate_prompt_tokens")
        if "cache_salt" in self.model_fields_set and not self.cache_salt:
            raise refuse("must not be empty", at="cache_salt")
        return self


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    refused: ClassVar[Mapping[str, str]] = {
        **GenerationRequest.refused,
        "suffix": "the models served do not fill gaps",
        "prompt_embeds": "prompts are text or token ids",
    }

    prompt: PromptsField
    logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool = True


class ChatMessage(StrictModel):
    """One message. `developer` is another name for `system`; without content only an assistant may speak."""

    refused: ClassVar[Mapping[str, str]] = {
        "tool_calls": _NO_TOOLS,
        "tool_call_id": _NO_TOOLS,
        "function_call": _NO_TOOLS,
        "audio": "the models served read text only",
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: ContentField = ""
    name: Label | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_no_tool(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("role") in ("tool", "function"):
            raise refuse_feature(f"{fields['role']!r}: not supported: {_NO_TOOLS}", at="role")
        return fields

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise refuse(f"is required in a message of role {self.role!r}", at="content")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates want it."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class ChatFields(StrictModel):
    """The fields that decide how messages become a prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _prompt_ends_once(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse(
                "can't be true together with add_generation_prompt, which is true unless given",
                at="continue_final_message",
            )
        return self


class ChatCompletionRequest(GenerationRequest, ChatFields):
    """POST /v1/chat/completions"""

    refused: ClassVar[Mapping[str, str]] = {
        **GenerationRequest.refused,
        "tools": _NO_TOOLS,
        "tool_choice": _NO_TOOLS,
        "parallel_tool_calls": _NO_TOOLS,
        "functions": _NO_TOOLS,
        "function_call": _NO_TOOLS,
        "modalities": "answers are text",
        "audio": "answers are text",
    }

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _logprobs_fit(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("is only allowed with logprobs true", at="top_logprobs")
        return self


class TokenizePromptRequest(ModelRequest):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ModelRequest, ChatFields):
    """POST /tokenize with messages."""

    refused: ClassVar[Mapping[str, str]] = {"tools": _NO_TOOLS}

    return_token_strs: bool = False


class DetokenizeRequest(ModelRequest):
    """POST /detokenize"""

    tokens: list[int]
    skip_special_tokens: bool = False
