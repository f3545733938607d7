import asyncio

import pytest

from weir.cluster.owned_tasks import OwnedTasks
from weir.core.errors import ConfigError


async def test_leaving_ends_every_task() -> None:
    async with OwnedTasks() as tasks:
        task = tasks.start(asyncio.Event().wait())  # type: ignore[arg-type]
        await asyncio.sleep(0)
    assert task.cancelled()


async def test_error_of_the_body_leaves_unwrapped() -> None:
    async def body() -> None:
        async with OwnedTasks() as tasks:
            tasks.start(asyncio.Event().wait())  # type: ignore[arg-type]
            raise ConfigError("x")

    with pytest.raises(ConfigError):
        await body()


async def test_error_of_a_task_ends_the_body() -> None:
    async def fail() -> None:
        raise ValueError("bug")

    async def body() -> None:
        async with OwnedTasks() as tasks:
            tasks.start(fail())
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as group:
        await body()
    assert group.group_contains(ValueError, match="bug")


async def test_cancellation_from_outside_passes_through() -> None:
    async def body() -> None:
        async with OwnedTasks() as tasks:
            tasks.start(asyncio.Event().wait())  # type: ignore[arg-type]
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await body()
