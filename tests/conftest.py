"""What every test shares: set before any import of the project, since Triton and torch read it once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists()
IS_FULL = os.environ.get("WEIR_TEST_FULL") == "1"

if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # set later it has no effect
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# gRPC's own handlers abort a child that is forked while a server lives here, before it becomes another program.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
# A developer's own settings must not leak into tests of the configuration.
for name in [name for name in os.environ if name.startswith("WEIR_") and not name.startswith("WEIR_TEST_")]:
    del os.environ[name]

import asyncio

import pytest
import uvloop
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("full", settings.get_profile("ci"), derandomize=False, max_examples=2000, print_blob=True)
settings.load_profile("full" if IS_FULL else "ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine or this run has no place for."""
    for item in items:
        if item.get_closest_marker("full") and not IS_FULL:
            item.add_marker(pytest.mark.skip(reason="long form: make test-full"))
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that the processes run on."""
    return {"uvloop": uvloop.new_event_loop}
