"""Chat messages to prompt text, by the Jinja template that comes with a model.

Templates are programs from elsewhere: they run in a sandbox that can read its arguments and change nothing. The
environment offers what Hugging Face's templates use, and behaves as theirs does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weir.core.errors import InvalidRequestError, ModelLoadError
from weir.text.tokenizer import TOKENIZER_CONFIG_FILE, read_tokenizer_config

TEMPLATE_FILE = "chat_template.jinja"

PART_SEPARATOR = "\n"
"""Between the text parts of one message, as vLLM joins them."""

_CONTINUE_MARK = "\ue000weir-continue\ue001 "
"""Private-use characters around it: no message holds it by accident. The space shows whether a template trims."""

_RENDER_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip

Message = Mapping[str, Any]
"""`role` and `content` (a string), perhaps `name`."""


class ChatTemplate:
    """One compiled template; immutable.

    Args:
        source: the Jinja text.
        special_tokens: names a template may use, such as `bos_token`.
        now: the clock of `strftime_now`.

    Raises:
        InvalidRequestError: the text is no template; names the line.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._template = _compile(source)
        self._globals = {**(special_tokens or {}), "strftime_now": lambda pattern: now().strftime(pattern)}

    @classmethod
    def load(cls, model_dir: Path, *, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """The model's own template: `chat_template.jinja`, else the entry in tokenizer_config.json, else None.

        Raises:
            ModelLoadError: it is no template; names the file.
        """
        path = model_dir / TEMPLATE_FILE
        source = path.read_text(encoding="utf-8") if path.exists() else None
        if source is None:
            path = model_dir / TOKENIZER_CONFIG_FILE
            source = _default_source(read_tokenizer_config(model_dir).get("chat_template"))
        if source is None:
            return None
        try:
            return cls(source, special_tokens=special_tokens)
        except InvalidRequestError as exc:
            raise ModelLoadError(f"{path}: {exc.message}") from exc

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text.

        Args:
            continue_final_message: end right after the last message's content, so that the model goes on with it.
            variables: further names for the template, from the client.

        Raises:
            InvalidRequestError: the template refuses these messages; carries its own words.
        """
        if continue_final_message:
            if not messages:
                raise InvalidRequestError("continue_final_message: there is no message to continue", param="messages")
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + _CONTINUE_MARK}]
        try:
            text = self._template.render(
                {
                    **self._globals,
                    **(variables or {}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _RENDER_ERRORS as exc:
            raise InvalidRequestError(f"messages: the chat template refuses them: {exc}", param="messages") from exc
        return _cut_at_mark(text) if continue_final_message else text


def join_parts(texts: Sequence[str]) -> str:
    """The content of a message that came as a list of text parts."""
    return PART_SEPARATOR.join(texts)


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_CONTINUE_MARK.rstrip())
    if position < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not keep the last message's content", param="messages"
        )
    kept = text[:position]
    return kept if text.startswith(_CONTINUE_MARK, position) else kept.rstrip()


def _default_source(entry: Any) -> str | None:
    """tokenizer_config.json holds one template, or several by name of which `default` is meant."""
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    try:
        return _ENVIRONMENT.from_string(source)
    except (jinja2.TemplateError, RecursionError) as exc:
        line = getattr(exc, "lineno", None)
        where = f" (line {line})" if line else ""
        raise InvalidRequestError(f"chat_template: not a Jinja template: {exc}{where}", param="chat_template") from exc


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; rendering ignores it."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's filter: unlike Jinja's own it escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


_ENVIRONMENT = _environment()
