"""Settings of both ends, as the services hand them down; checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.framing import MAX_PAYLOAD_BYTES
from weir.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionTiming:
    """How a dead or stopped peer is noticed.

    Attributes:
        heartbeat_s: silence after which a side says that it lives; also the granularity of the other two.
        idle_timeout_s: silence after which a peer counts as lost.
        handshake_timeout_s: longest handshake.
    """

    heartbeat_s: float = 1.0
    idle_timeout_s: float = 5.0
    handshake_timeout_s: float = 3.0

    def __post_init__(self) -> None:
        _check_positive(self, "heartbeat_s", "handshake_timeout_s")
        if self.idle_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"idle_timeout_s is {self.idle_timeout_s}, below two heartbeats of {self.heartbeat_s}",
                param="idle_timeout_s",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderConfig:
    """The prefill worker's end.

    Attributes:
        lease_s: how long a sealed hold lives without RENEW.
        park_timeout_s: how long a FETCH waits for its offer, or for the binding to its sender.
        max_parked: fetches that may wait so.
        frame_bytes: most payload of one frame; turns among transfers are of this size. Half of it costs a tenth more
            CPU time a byte, twice of it saves nothing.
        wants_checksums: whether payload carries checksums; the decode worker may want them too.
    """

    lease_s: float = 30.0
    park_timeout_s: float = 5.0
    max_parked: int = 1024
    max_connections: int = 1024
    frame_bytes: int = 512 << 10
    wants_checksums: bool = True
    timing: ConnectionTiming = field(default_factory=ConnectionTiming)

    def __post_init__(self) -> None:
        _check_positive(self, "lease_s", "park_timeout_s", "max_connections", "frame_bytes")
        if self.frame_bytes > MAX_PAYLOAD_BYTES:
            raise ConfigError(f"frame_bytes is {self.frame_bytes}, above {MAX_PAYLOAD_BYTES}", param="frame_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverConfig:
    """The decode worker's end.

    Attributes:
        initial_credit_bytes: what a source may send before the sink is there; staged, so it costs memory.
        window_bytes: what may be under way of one hand-off afterwards.
        progress_timeout_s: longest silence of a hand-off that has begun and of which something is owed.
        connect_timeout_s: longest single attempt to connect.
        max_attempts: failed connections in a row, without progress between them, after which a worker counts as lost.
        backoff_s: pause after the first of them; doubles each time.
        wants_checksums: whether payload carries checksums; the prefill worker may want them too.
    """

    initial_credit_bytes: int = 1 << 20
    window_bytes: int = 16 << 20
    progress_timeout_s: float = 10.0
    connect_timeout_s: float = 2.0
    max_attempts: int = 4
    backoff_s: float = 0.05
    wants_checksums: bool = True
    timing: ConnectionTiming = field(default_factory=ConnectionTiming)

    def __post_init__(self) -> None:
        _check_positive(self, "progress_timeout_s", "connect_timeout_s", "max_attempts", "backoff_s")
        # The largest frame must fit into what is left while a quarter of the window is not given back.
        limits = {"initial_credit_bytes": MAX_PAYLOAD_BYTES, "window_bytes": 2 * MAX_PAYLOAD_BYTES}
        for name, minimum in limits.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name} is {getattr(self, name)}, below {minimum}", param=name)


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name} is {getattr(config, name)}, not above 0", param=name)
