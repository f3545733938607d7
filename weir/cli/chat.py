"""`weir chat`: a conversation with a running gateway, streamed.

Ctrl-C stops an answer, Ctrl-D ends the conversation.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from weir.cli.up_config import DEFAULT_URL
from weir.core.errors import ConfigError, UnavailableError, WeirError
from weir.runtime.config import load_config, setting

EXIT_FAILED = 2
CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 60.0
"""The gateway sends a comment line every 15 s at least."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Talk to a running gateway."""

    question: str | None = setting(
        None, help="one question, answered once; none starts a conversation", is_positional=True
    )
    url: str = setting(DEFAULT_URL, help="the gateway")
    api_key: str | None = setting(None, help="key of the gateway, where it asks for one", secret=True)
    system: str | None = setting(None, help="instruction before the first message")
    model_name: str | None = setting(None, help="which of the models served; none takes the gateway's first")
    max_tokens: int | None = setting(None, help="longest answer, in tokens; none: as the context has room", minimum=1)
    temperature: float = setting(0.7, help="0 always takes the likeliest token", minimum=0)

    def validate(self) -> None:
        """Raises ConfigError for a URL that is none."""
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as exc:
            raise ConfigError(f"url: {self.url!r} is no URL: {exc}", param="url") from exc
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"url: {self.url!r} is not http://host:port", param="url")


@dataclass(slots=True)
class Conversation:
    """The messages so far; an answer that failed leaves no trace in it."""

    client: httpx.Client
    config: ChatConfig
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.config.system:
            self.messages.append({"role": "system", "content": self.config.system})

    def ask(self, question: str) -> Generator[str, None, None]:
        """Pieces of the answer as they come. What was received when the reader leaves stays in the conversation.

        Raises:
            WeirError: the gateway's own words.
            UnavailableError: there is no gateway.
        """
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body: dict[str, Any] = {
            "messages": self.messages,
            "stream": True,
            "temperature": self.config.temperature,
        }
        if self.config.max_tokens is not None:
            body["max_tokens"] = self.config.max_tokens
        if self.config.model_name:
            body["model"] = self.config.model_name
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from _text_of(json.loads(line.removeprefix("data: ")))
        except httpx.ConnectError as exc:
            raise UnavailableError(f"no gateway answers at {self.config.url}: {exc}; start one with `weir up`") from exc
        except httpx.TransportError as exc:
            raise UnavailableError(f"the connection to {self.config.url} broke: {exc}") from exc


def chat(argv: Sequence[str]) -> int:
    """One answer when a question is given, else a conversation; returns the exit code.

    Raises:
        WeirError: a setting is wrong or, with a question, there is no answer.
    """
    config = load_config(ChatConfig, argv, prog="weir chat")
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    with httpx.Client(base_url=config.url, headers=headers, timeout=timeout, trust_env=False) as client:
        conversation = Conversation(client, config)
        if config.question is not None:
            _print_answer(conversation, config.question)
        else:
            return _converse(conversation)
    return 0


def _converse(conversation: Conversation) -> int:
    """Until the end of the input; a refusal ends only its answer, and counts where nobody sits at a terminal."""
    exit_code = 0
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its editing keys
        print("Ctrl-C stops an answer, Ctrl-D ends the conversation.")
    while True:
        try:
            question = input("> " if is_terminal else "").strip()
        except EOFError:
            return exit_code
        except KeyboardInterrupt:
            print()
            continue
        if not question:
            continue
        try:
            _print_answer(conversation, question)
        except KeyboardInterrupt:
            print(" [stopped]")
        except WeirError as exc:
            print(f"weir chat: {exc.message}", file=sys.stderr)
            exit_code = 0 if is_terminal else EXIT_FAILED


def _print_answer(conversation: Conversation, question: str) -> None:
    with contextlib.closing(conversation.ask(question)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print()


def _text_of(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise UnavailableError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", ()):
        text = choice.get("delta", {}).get("content")
        if text:
            yield text


def _refusal(response: httpx.Response) -> WeirError:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    return UnavailableError(f"{message} (HTTP {response.status_code})")
