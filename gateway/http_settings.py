"""What the HTTP side of the gateway lets a client do; the process configuration is turned into this once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Limits and rules of the HTTP interface.

    Attributes:
        api_keys: any of them opens every route; none at all means that no key is asked for.
        cors_origins: origins whose pages may call; `("*",)` for all, none by default.
        max_body_bytes: longest request body.
        body_timeout_s: longest time a request body may take to arrive.
        request_timeout_s: deadline of a request, from its arrival to its last token.
        keep_alive_s: an event stream that was silent for so long gets a comment line.
        stall_timeout_s: a client so slow that a write waits so long for it is dropped.
        max_logprobs: most alternatives a client may ask for at one position.
        max_prompts: most prompts in one completion request.
        max_choices: most choices in one request, prompts times n.
        trust_request_chat_template: whether a request may bring its own chat template, which is a program.
    """

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_s: float = 60.0
    request_timeout_s: float = 3600.0
    keep_alive_s: float = 15.0
    stall_timeout_s: float = 60.0
    max_logprobs: int = 20
    max_prompts: int = 256
    max_choices: int = 256
    trust_request_chat_template: bool = False
