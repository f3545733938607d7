"""The settings of a prefill worker: those of every worker, and how long and how much it holds for others."""

from __future__ import annotations

from dataclasses import dataclass

from weir.core.errors import ConfigError
from weir.runtime.config import setting
from weir.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """A prefill worker: computes prompts and hands their KV to decode workers."""

    transfer_listen: str | None = setting(
        None, help="KV transfer listener, tcp://host:port or unix:///path; none takes a free TCP port of the host"
    )
    lease_s: float = setting(30.0, help="how long KV is held for a decode worker that does not come", minimum=0.1)
    max_held_blocks: int | None = setting(
        None, help="most KV blocks computed or held for hand-offs at once; none takes the whole pool", minimum=1
    )
    max_queue_s: float = setting(10.0, help="longest wait for held blocks to come free", minimum=0.0)

    def validate(self) -> None:
        WorkerConfig.validate(self)
        listen = self.transfer_listen
        if listen is not None and not listen.startswith(("tcp://", "unix:///")):
            raise ConfigError(
                f"transfer_listen: {listen!r} is neither tcp://host:port nor unix:///path", param="transfer_listen"
            )

    @property
    def transfer_address(self) -> str:
        """Where to listen for decode workers."""
        return self.transfer_listen or f"tcp://{self.host}:0"
