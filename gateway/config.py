"""The settings of the gateway: where it listens, what it serves, and the bound of every wait."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gateway.http_settings import HttpSettings
from gateway.pipeline import PipelineSettings
from gateway.router import RouterSettings
from weir.core.errors import ConfigError
from weir.runtime.config import setting
from weir.runtime.logs import FORMATS, LEVELS

RENEWALS_PER_LEASE = 6


class RedisPolicy(Enum):
    """What becomes of new requests while Redis is away; running ones go on either way."""

    DEGRADE = "degrade"
    """Route from what was known last."""
    REFUSE = "refuse"
    """503 with Retry-After."""


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The gateway: OpenAI-compatible HTTP and gRPC in front of prefill and decode workers."""

    model_dirs: tuple[str, ...] = setting(help="prepared model directories; the first is the default model")
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        help="registry, request states and prefix index; also rediss, unix, redis+sentinel, redis+cluster",
    )
    redis_policy: RedisPolicy = setting(RedisPolicy.DEGRADE, help="new requests while Redis is away: degrade, refuse")
    gateway_id: str | None = setting(None, help="name in the cluster; none draws one")
    registration_ttl_s: float = setting(
        6.0, help="the workers' setting, here alike: one silent for this long is gone", minimum=0.5
    )

    host: str = setting("127.0.0.1", help="address to listen on, HTTP and gRPC")
    port: int = setting(8000, help="HTTP port; 0 takes a free one", minimum=0, maximum=65535)
    grpc_port: int | None = setting(8001, help="gRPC port; 0 takes a free one, none: no gRPC", minimum=0, maximum=65535)
    api_keys: tuple[str, ...] = setting((), help="keys that clients must send; none asks for no key", secret=True)
    cors_origins: tuple[str, ...] = setting((), help="origins whose pages may call; * for all")

    max_running_prompts: int = setting(512, help="prompts that may run at once", minimum=1)
    max_waiting_requests: int = setting(1024, help="requests that may wait for that; more are refused", minimum=0)
    max_admission_wait_s: float = setting(60.0, help="how long a request may wait for that", minimum=0.0)

    allow_local_prefill: bool = setting(True, help="let decode workers compute prompts where no prefill worker can")
    local_prefill_max_tokens: int = setting(
        16, help="let decode workers compute prompts of which they lack no more tokens than this", minimum=0
    )
    header_wait_s: float = setting(10.0, help="how long an answer's header waits for workers to grant", minimum=0.0)
    redispatch_wait_s: float = setting(30.0, help="how long a stream that lost its worker waits for one", minimum=0.0)
    max_dispatches: int = setting(4, help="attempts of one choice, the first included", minimum=1)
    lease_s: float = setting(
        30.0, help="the prefill workers' setting, here no longer than there: how long KV is held", minimum=0.1
    )
    max_buffered_tokens: int = setting(
        16_384, help="tokens of a prompt that may wait for a slow client; with more it is dropped", minimum=1
    )

    max_body_bytes: int = setting(16 * 1024 * 1024, help="longest request body", minimum=1024)
    body_timeout_s: float = setting(60.0, help="how long a request body may take", minimum=0.1)
    request_timeout_s: float = setting(3600.0, help="deadline of a request, to its last token", minimum=0.1)
    keep_alive_s: float = setting(15.0, help="a silent event stream gets a comment line this often", minimum=0.01)
    stall_timeout_s: float = setting(60.0, help="a client that takes no bytes for so long is dropped", minimum=0.1)
    max_logprobs: int = setting(20, help="most alternatives at one position", minimum=0)
    max_prompts: int = setting(256, help="most prompts in one completion request", minimum=1)
    max_choices: int = setting(256, help="most choices in one request: prompts times n", minimum=1)
    trust_request_chat_template: bool = setting(False, help="take chat templates, which are programs, from requests")
    drain_s: float = setting(30.0, help="how long running requests may go on after SIGTERM", minimum=0.0)

    log_level: str = setting("info", help="least severe record to log", choices=LEVELS)
    log_format: str = setting("console", help="for people or as JSON", choices=FORMATS)
    otlp_endpoint: str | None = setting(None, help="where traces go, such as http://127.0.0.1:4317; none makes none")
    legacy_aliases: bool = setting(False, help="also give metrics under the former names that dashboards may use")

    def validate(self) -> None:
        """What no single field says. Raises ConfigError naming the field and the value."""
        if not self.model_dirs:
            raise ConfigError("model_dirs: at least one is needed", param="model_dirs")
        for model_dir in self.model_paths:
            if not model_dir.is_dir():
                raise ConfigError(f"model_dirs: {model_dir} is not a directory", param="model_dirs")
        if self.grpc_port is not None and self.grpc_port == self.port != 0:
            raise ConfigError(f"grpc_port: {self.grpc_port} is the HTTP port too", param="grpc_port")

    @property
    def model_paths(self) -> tuple[Path, ...]:
        return tuple(Path(model_dir).expanduser() for model_dir in self.model_dirs)

    def http_settings(self) -> HttpSettings:
        """The part of the HTTP interface."""
        return HttpSettings(
            api_keys=self.api_keys,
            cors_origins=self.cors_origins,
            max_body_bytes=self.max_body_bytes,
            body_timeout_s=self.body_timeout_s,
            request_timeout_s=self.request_timeout_s,
            keep_alive_s=self.keep_alive_s,
            stall_timeout_s=self.stall_timeout_s,
            max_logprobs=self.max_logprobs,
            max_prompts=self.max_prompts,
            max_choices=self.max_choices,
            trust_request_chat_template=self.trust_request_chat_template,
        )

    def pipeline_settings(self) -> PipelineSettings:
        """The part of the pipeline."""
        return PipelineSettings(
            header_wait_s=self.header_wait_s,
            redispatch_wait_s=self.redispatch_wait_s,
            max_dispatches=self.max_dispatches,
            renew_interval_s=self.lease_s / RENEWALS_PER_LEASE,
            max_buffered_tokens=self.max_buffered_tokens,
            needs_redis=self.redis_policy is RedisPolicy.REFUSE,
        )

    def router_settings(self) -> RouterSettings:
        """The part of the router."""
        return RouterSettings(
            local_prefill_max_tokens=self.local_prefill_max_tokens,
            allow_local_prefill=self.allow_local_prefill,
        )
