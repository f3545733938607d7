from __future__ import annotations

import pytest

from weir.worker.address import reachable_host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.1.2.3", "worker-3.example"])
def test_a_host_that_names_one_interface_is_the_address(host: str) -> None:
    assert reachable_host(host, "redis://192.0.2.1:6379") == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
@pytest.mark.parametrize(
    "redis_url",
    [
        "redis://127.0.0.1:6379/0",
        "redis+sentinel://127.0.0.1:26379,127.0.0.1:26380/primary",
        "redis+cluster://127.0.0.1:7000",
        "unix:///run/redis.sock",
        "redis://no-such-host.invalid:6379",
    ],
)
def test_any_interface_becomes_the_one_that_reaches_redis(host: str, redis_url: str) -> None:
    assert reachable_host(host, redis_url) == "127.0.0.1"
