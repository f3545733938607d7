from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from weir.core.errors import ConfigError
from weir.runtime.metrics_server import Health, start_metrics_server


async def test_metrics_health_and_ready_are_served() -> None:
    registry = CollectorRegistry()
    Counter("made", "things", registry=registry).inc(3)
    health = Health(is_live=True, is_ready=False, detail="draining")
    async with start_metrics_server(registry, "127.0.0.1", 0, lambda: health) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            metrics = await client.get("/metrics")
            live = await client.get("/health")
            ready = await client.get("/ready?x=1")
            health = Health(is_live=True, is_ready=True)
            ready_now = await client.get("/ready")
            other = await client.get("/secrets")
            posted = await client.post("/metrics")
    assert metrics.status_code == 200
    assert "made_total 3.0" in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain")
    assert (live.status_code, ready.status_code, ready.text) == (200, 503, "draining\n")
    assert (ready_now.status_code, ready_now.text) == (200, "ok\n")
    assert (other.status_code, posted.status_code) == (404, 405)


async def test_a_taken_port_is_refused_by_name() -> None:
    registry = CollectorRegistry()
    health = Health(is_live=True, is_ready=True)
    async with start_metrics_server(registry, "127.0.0.1", 0, lambda: health) as port:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            async with start_metrics_server(registry, "127.0.0.1", port, lambda: health):
                pytest.fail("two servers on one port")
