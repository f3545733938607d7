"""One request before it is sent, its body written out, so that sending it costs nothing but the sending."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from weir.bench.prompt_maker import Prompt


class Endpoint(Enum):
    """Which interface is measured."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/chat/completions" if self is Endpoint.CHAT else "/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What every request asks for beside its length."""

    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """What is sent, and when its turn is: `due_s` after the start of the run."""

    kind: str
    index: int
    due_s: float
    body: bytes
    input_tokens: int
    output_tokens: int


def plan_request(
    prompt: Prompt,
    *,
    model: str,
    endpoint: Endpoint,
    sampling: Sampling,
    output_tokens: int,
    kind: str = "main",
    index: int = 0,
    due_s: float = 0.0,
) -> RequestPlan:
    """A streamed request of exactly `output_tokens` tokens, if the server knows `ignore_eos`."""
    body: dict[str, Any] = {"model": model}
    if endpoint is Endpoint.CHAT:
        body["messages"] = [{"role": "user", "content": prompt.content}]
    else:
        body["prompt"] = prompt.content
    body |= {
        "max_tokens": output_tokens,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.temperature > 0:
        body["seed"] = sampling.seed + index
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    return RequestPlan(
        kind=kind,
        index=index,
        due_s=due_s,
        body=json.dumps(body).encode(),
        input_tokens=prompt.num_tokens,
        output_tokens=output_tokens,
    )
