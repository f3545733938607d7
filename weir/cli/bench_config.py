"""The settings of `weir bench`, and the workload that they make of a preset."""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from weir.bench.lengths import Lengths
from weir.bench.metrics import GoodputLimits
from weir.bench.prompt_maker import PromptKind
from weir.bench.request_plan import Endpoint
from weir.bench.server_address import ServerAddress
from weir.bench.workload import PRESETS, Workload
from weir.cli.up_config import DEFAULT_URL
from weir.core.errors import ConfigError
from weir.runtime.config import setting

CUSTOM = "custom"
MAX_RATE = 100_000.0
STANDARD_OUTPUT = Path("-")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Measure a server that speaks OpenAI's interface: a workload by name, or changed by what follows it."""

    base_url: str = setting(DEFAULT_URL, help="the server, with or without /v1")
    api_key: str | None = setting(None, help="key of the server, where it asks for one", secret=True)
    model: str | None = setting(
        None, help="which of the models served; none takes the server's first", variable="WEIR_MODEL_NAME"
    )
    endpoint: Endpoint = setting(Endpoint.COMPLETIONS, help="completions or chat")
    workload: str = setting("w1", help="shape and pace of the requests", choices=tuple(PRESETS))
    input_tokens: str | None = setting(
        None, help="own tokens of a prompt: a number, LOW:HIGH, or lognormal:MEDIAN:SIGMA:MAXIMUM"
    )
    output_tokens: str | None = setting(None, help="tokens of an answer, in the same forms")
    shared_prefix_tokens: int | None = setting(
        None, help="tokens that all prompts begin with", minimum=0, maximum=100_000
    )
    num_requests: int | None = setting(None, help="requests of a run", minimum=1, maximum=100_000)
    concurrency: int | None = setting(
        None, help="requests that run at a time; the next begins when one ends", minimum=1, maximum=10_000
    )
    request_rate: tuple[str, ...] = setting(
        (), help="requests a second, in a Poisson process; inf: all at once; several: a run for each"
    )
    burst_requests: int | None = setting(None, help="w5: prompts that land together", minimum=1, maximum=10_000)
    burst_input_tokens: int | None = setting(None, help="w5: tokens of each of them", minimum=1, maximum=100_000)
    prompt_kind: PromptKind | None = setting(
        None, help="tokens: prompts are lists of token ids; text; none: tokens for completions, text for chats"
    )
    tokenizer: Path | None = setting(
        None, help="a directory with a tokenizer.json, or the file; none asks the server's /tokenize"
    )
    text_file: Path | None = setting(None, help="what prompts are made of; none takes Python's own help")
    ignore_eos: bool = setting(True, help="ask for answers of full length; not every server knows how")
    temperature: float = setting(0.0, help="0 always takes the likeliest token", minimum=0, maximum=100)
    seed: int = setting(0, help="lengths and arrivals are the same for the same seed", minimum=0)
    salt: str | None = setting(
        None, help="texts are the same for the same salt; none draws one, so that no prefix cache knows them"
    )
    goodput: tuple[str, ...] = setting(
        ("ttft=2", "tpot=0.1"), help="what a good request meets, in seconds: any of ttft, tpot, itl, e2el"
    )
    warmup: int = setting(1, help="requests before the measurement", minimum=0, maximum=10_000)
    max_duration_s: float | None = setting(
        None, help="no request begins later; those that run go on to their end", minimum=0.001
    )
    timeout_s: float = setting(600.0, help="longest time of a request", minimum=0.001)
    json: Path | None = setting(None, help="file for all figures and every request; - is the standard output")
    quiet: bool = setting(False, help="no progress and no table")

    def validate(self) -> None:
        """What no single field says. Raises ConfigError."""
        self.address()
        self.shape()
        self.limits()
        if self.endpoint is Endpoint.CHAT and self.prompt_kind is PromptKind.TOKENS:
            raise ConfigError("prompt_kind: tokens is for completions; messages of chats are text", param="prompt_kind")
        if self.json is not None and self.json != STANDARD_OUTPUT:
            folder = self.json.absolute().parent
            if self.json.is_dir() or not os.access(folder, os.W_OK):
                raise ConfigError(f"json: {self.json} cannot be written", param="json")

    def address(self) -> ServerAddress:
        """Raises ConfigError."""
        return ServerAddress.parse(self.base_url, self.api_key)

    def limits(self) -> GoodputLimits:
        """Raises ConfigError."""
        return GoodputLimits.parse(self.goodput)

    def shape(self) -> Workload:
        """The preset with what was changed of it, which makes it a custom one. Raises ConfigError."""
        preset = PRESETS[self.workload]
        changes: dict[str, Any] = {}
        for name in ("input_tokens", "output_tokens"):
            if (text := getattr(self, name)) is not None:
                changes[name] = Lengths.parse(text, name=name)
        for name in ("shared_prefix_tokens", "num_requests"):
            if (number := getattr(self, name)) is not None:
                changes[name] = number
        changes |= self._changed_pace(preset) | self._changed_burst(preset)
        changed = replace(preset, **changes)
        return preset if changed == preset else replace(changed, name=CUSTOM)

    def kind_of_prompts(self) -> PromptKind:
        if self.prompt_kind is not None:
            return self.prompt_kind
        return PromptKind.TEXT if self.endpoint is Endpoint.CHAT else PromptKind.TOKENS

    def drawn_salt(self) -> str:
        return self.salt if self.salt is not None else secrets.token_hex(8)

    def described(self) -> dict[str, Any]:
        """For the record, JSON-ready: every setting but the key, and those of the workload as they came to be."""
        workload = self.shape()
        settings = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        del settings["api_key"]
        return {
            **settings,
            "input_tokens": str(workload.input_tokens),
            "output_tokens": str(workload.output_tokens),
            "shared_prefix_tokens": workload.shared_prefix_tokens,
            "num_requests": workload.num_requests,
            "concurrency": workload.concurrency,
            "request_rate": [f"{rate:g}" for rate in workload.request_rates],
            "prompt_kind": self.kind_of_prompts().value,
        }

    def _changed_pace(self, preset: Workload) -> dict[str, Any]:
        if self.concurrency is not None and self.request_rate:
            raise ConfigError(
                f"request_rate: {','.join(self.request_rate)} goes with no concurrency ({self.concurrency}); "
                "give one of them",
                param="request_rate",
            )
        if self.request_rate:
            if preset.burst is not None:
                raise ConfigError(f"request_rate: {preset.name} has its own pace", param="request_rate")
            return {"concurrency": None, "request_rates": tuple(map(_parse_rate, self.request_rate))}
        if self.concurrency is None:
            return {}
        if preset.burst is not None:  # every steady stream is one request
            return {"concurrency": self.concurrency, "num_requests": self.concurrency}
        return {"concurrency": self.concurrency, "request_rates": ()}

    def _changed_burst(self, preset: Workload) -> dict[str, Any]:
        given = {"num_requests": self.burst_requests, "input_tokens": self.burst_input_tokens}
        changes = {name: number for name, number in given.items() if number is not None}
        if preset.burst is None:
            if changes:
                raise ConfigError(f"burst_requests and burst_input_tokens: {preset.name} has no burst; w5 has")
            return {}
        if self.num_requests is not None:
            raise ConfigError("num_requests: w5 has one for each stream; give concurrency", param="num_requests")
        return {"burst": replace(preset.burst, **changes)}


def _parse_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (0 < rate <= MAX_RATE or rate == math.inf):
        raise ConfigError(
            f"request_rate: {text!r} is neither inf nor a number above 0, at most {MAX_RATE:,.0f}",
            param="request_rate",
        )
    return rate


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
