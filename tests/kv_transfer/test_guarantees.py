"""Whole hand-offs over a link that loses, repeats, corrupts, stalls and breaks, in virtual time and from a seed.

However it goes: a fetch ends; what it returns is right; nobody writes to its sink afterwards; every source hears its
end exactly once, is not read afterwards and was not changed under a write; no hold outlives its lease. Of three seeds
the blocks of one are on devices, where each piece takes a while, and those of another are copied by the decode worker
out of the prefill worker's memory, whatever is in it by then.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kv_transfer.offer import Offer
from kv_transfer.receiver import TransferClient
from kv_transfer.sender import TransferServer
from kv_transfer.settings import ConnectionTiming, ReceiverConfig, SenderConfig
from kv_transfer.transfer_state import EndReason, Seal
from tests.fakes.kv_blocks import FakeMemory, FakeSink, FakeSource, SlowSink, SlowSource, tokens_of
from tests.fakes.memory_transport import Faults, MemoryNetwork
from tests.fakes.virtual_loop import run_virtual, virtual_clock
from tests.kv_transfer.identities import FIRST_TOKEN, LAYOUT, make_identity, make_key, with_block_size
from weir.core.deadline import Deadline
from weir.core.errors import ConflictError, HandoffLostError, WeirError
from weir.core.request import HandoffKey

TIMING = ConnectionTiming(heartbeat_s=0.2, idle_timeout_s=1.0, handshake_timeout_s=0.6)
SENDER = SenderConfig(lease_s=3.0, park_timeout_s=1.0, frame_bytes=1 << 12, timing=TIMING)
RECEIVER = ReceiverConfig(progress_timeout_s=2.0, connect_timeout_s=1.0, timing=TIMING)
DEADLINE_S = 8.0
NUM_HANDOFFS = 6

FAULTS = {
    "none": Faults(),
    "pieces": Faults(max_piece_bytes=700),
    "lossy": Faults(lose_write=0.02, max_delay_s=0.003),
    "repeating": Faults(repeat_write=0.02, max_delay_s=0.003),
    "corrupting": Faults(flip_bit=0.01, max_delay_s=0.003),
    "breaking": Faults(break_link=0.008, max_delay_s=0.003),
    "stalling": Faults(stall_s=1.3, max_delay_s=0.01),
    "everything": Faults(
        lose_write=0.005, repeat_write=0.005, flip_bit=0.005, break_link=0.01, stall_s=1.5, max_delay_s=0.01
    ),
}


@dataclass
class Outcome:
    """What became of one hand-off."""

    source: FakeSource
    ends: list[EndReason] = field(default_factory=list)
    sinks: list[FakeSink] = field(default_factory=list)
    num_arrived: int = 0
    errors: list[WeirError] = field(default_factory=list)


class World:
    """One prefill worker, two decode workers and a gateway that does as the seed says."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.rng = random.Random(seed)
        self.has_devices = seed % 3 > 0
        self.memory = FakeMemory()
        domain = "shared" if seed % 3 == 2 else ""
        self.network = MemoryNetwork(
            Faults(
                seed=seed,
                lose_write=faults.lose_write,
                repeat_write=faults.repeat_write,
                flip_bit=faults.flip_bit,
                break_link=faults.break_link,
                stall_s=faults.stall_s,
                max_delay_s=faults.max_delay_s,
                max_piece_bytes=faults.max_piece_bytes,
            ),
            kernel_bytes=1 << 14,
        )
        self.server = TransferServer(
            make_identity("p", memory_domain=domain),
            ["p"],
            SENDER,
            export_memory=lambda: b"handle",
            transport=self.network,
            clock=virtual_clock,
        )
        self.clients = {
            name: TransferClient(
                make_identity(name, layout=with_block_size(block_size), memory_domain=domain),
                RECEIVER,
                map_memory=self.map_memory,
                transport=self.network,
                clock=virtual_clock,
            )
            for name, block_size in (("d", LAYOUT.block_size), ("e", 12))
        }
        self.outcomes: dict[HandoffKey, Outcome] = {}
        self.released: set[HandoffKey] = set()

    async def map_memory(self, handle: bytes) -> FakeMemory:
        assert handle == b"handle"
        return self.memory

    async def run(self) -> None:
        async with self.server, self.clients["d"], self.clients["e"]:
            async with asyncio.TaskGroup() as tasks:
                for index in range(NUM_HANDOFFS):
                    tasks.create_task(self.hand_off(index))
            await asyncio.sleep(SENDER.lease_s + 2.0)  # longer than any lease, with all peers idle
            assert self.server.num_held == 0
            assert self.server.num_unreleased == 0
            assert self.server.num_in_flight == 0
            assert all(client.num_in_flight == 0 for client in self.clients.values())

    async def hand_off(self, index: int) -> None:
        rng = self.rng
        await asyncio.sleep(rng.random() * 0.2)
        num_tokens = rng.randint(1, 150)
        for epoch in range(1, rng.choice((1, 1, 2)) + 1):
            key = make_key(f"h{index}", epoch)
            source = FakeSource(LAYOUT, num_tokens, seed=index, memory=self.memory)
            if self.has_devices:
                source = SlowSource(
                    LAYOUT, num_tokens, seed=index, memory=self.memory, delay_s=lambda: rng.random() * 0.004
                )
            self.outcomes[key] = Outcome(source)
            async with asyncio.TaskGroup() as tasks:
                decode, later = rng.sample(("d", "e"), 2)
                is_rebound = rng.random() < 0.25
                tasks.create_task(self.prefill(key, decode))
                tasks.create_task(self.decode(key, decode, num_tokens))
                if is_rebound:
                    tasks.create_task(self.rebind(key, later, num_tokens))
                if rng.random() < 0.15:
                    tasks.create_task(self.release(key))

    async def prefill(self, key: HandoffKey, decode: str) -> None:
        rng, outcome = self.rng, self.outcomes[key]
        await asyncio.sleep(rng.random() * 0.05)

        def ended(ended_key: HandoffKey, reason: EndReason) -> None:
            assert ended_key == key
            outcome.ends.append(reason)
            outcome.source.close()

        try:
            offer: Offer = self.server.offer(
                key,
                decode_incarnation=f"{decode}-1",
                adapter="",
                source=outcome.source,
                deadline=Deadline.after(DEADLINE_S, virtual_clock),
                on_end=ended,
            )
        except ConflictError:
            assert key in self.released, "only a release that came before ends a hold that was never made"
            ended(key, EndReason.RELEASED)
            return
        num_full_blocks = outcome.source.num_tokens // LAYOUT.block_size
        for num_ready_blocks in sorted(rng.choices(range(num_full_blocks + 1), k=2)):
            await asyncio.sleep(rng.random() * 0.05)
            offer.extend(num_ready_blocks)
        await asyncio.sleep(rng.random() * 0.05)
        if rng.random() < 0.1:
            offer.fail(HandoffLostError("the computation was aborted"))
        else:
            offer.seal(Seal(num_tokens=outcome.source.num_tokens, first_token=FIRST_TOKEN))

    async def decode(self, key: HandoffKey, decode: str, num_tokens: int) -> None:
        rng, outcome = self.rng, self.outcomes[key]
        await asyncio.sleep(rng.random() * 0.1)
        client = self.clients[decode]
        layout = with_block_size(LAYOUT.block_size if decode == "d" else 12)
        skip_blocks = rng.choice((0, 0, rng.randint(0, (num_tokens - 1) // layout.block_size)))
        skip_tokens = skip_blocks * layout.block_size
        sink = FakeSink(layout, num_tokens, skip_tokens=skip_tokens)
        if self.has_devices:
            sink = SlowSink(layout, num_tokens, skip_tokens=skip_tokens, delay_s=lambda: rng.random() * 0.004)
        outcome.sinks.append(sink)
        patience_s = rng.choice((DEADLINE_S, DEADLINE_S, rng.random() * 0.3))

        async def sink_ready() -> FakeSink:
            await asyncio.sleep(rng.random() * 0.1)
            return sink

        started_s = virtual_clock()
        try:
            async with asyncio.timeout(patience_s):  # a client that leaves
                received = await client.fetch(
                    address="p",
                    incarnation="p-1",
                    key=key,
                    adapter="",
                    skip_tokens=sink.skip_tokens,
                    sink_ready=sink_ready,
                    deadline=Deadline.after(DEADLINE_S, virtual_clock),
                )
        except TimeoutError:
            assert patience_s <= DEADLINE_S
        except WeirError as error:
            outcome.errors.append(error)
        else:
            outcome.num_arrived += 1
            assert received.seal == Seal(num_tokens=num_tokens, first_token=FIRST_TOKEN)
            expected = tokens_of(LAYOUT, num_tokens, outcome.source.seed)
            assert np.array_equal(sink.tokens()[sink.skip_tokens :], expected[sink.skip_tokens :])
        finally:
            sink.freeze()
        assert (sink.slabs[:skip_blocks] == -1).all(), "what the worker already had was written"
        assert virtual_clock() - started_s <= DEADLINE_S + 0.01

    async def rebind(self, key: HandoffKey, decode: str, num_tokens: int) -> None:
        await asyncio.sleep(self.rng.random() * 0.3)
        try:
            self.server.rebind(key, f"{decode}-1")
        except HandoffLostError as error:
            self.outcomes[key].errors.append(error)
        else:
            await self.decode(key, decode, num_tokens)

    async def release(self, key: HandoffKey) -> None:
        await asyncio.sleep(self.rng.random() * 0.3)
        self.released.add(key)
        self.server.release(key)


def check(seed: int, faults: Faults) -> World:
    world: World | None = None

    async def main() -> World:
        nonlocal world
        world = World(seed, faults)
        await world.run()
        return world

    world = run_virtual(main())
    assert world.network.violations == []
    for key, outcome in world.outcomes.items():
        assert len(outcome.ends) == 1, (key, outcome.ends)
        assert all(sink.is_untouched() for sink in outcome.sinks)
    return world


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", range(8))
def test_guarantees_hold_on_any_link(name: str, seed: int) -> None:
    check(seed, FAULTS[name])


@pytest.mark.parametrize("name", ["none", "pieces"])
def test_a_perfect_link_brings_everything_that_is_wanted(name: str) -> None:
    for seed in range(20, 25):
        world = check(seed, FAULTS[name])
        for outcome in world.outcomes.values():
            assert outcome.num_arrived or outcome.ends != [EndReason.COMMITTED]
            assert all(type(error) is HandoffLostError for error in outcome.errors)


@pytest.mark.parametrize("name", ["lossy", "repeating", "corrupting", "breaking", "stalling"])
def test_a_link_that_only_fails_now_and_then_still_brings_most(name: str) -> None:
    worlds = [check(seed, FAULTS[name]) for seed in range(40, 44)]
    outcomes = [outcome for world in worlds for outcome in world.outcomes.values()]
    assert sum(outcome.num_arrived for outcome in outcomes) > len(outcomes) / 3
    num_nacks = sum(client.stats.nacked_pieces_total for world in worlds for client in world.clients.values())
    assert (num_nacks > 0) == (name == "corrupting")


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_guarantees_hold_through_thousands_of_faults(name: str) -> None:
    for seed in range(1000, 1150):
        check(seed, FAULTS[name])


def test_what_is_pulled_from_blocks_that_have_a_new_owner_is_never_accepted() -> None:
    """The hold ends while the decode worker copies: it cannot know, and is told so before it goes on."""
    num_refused = num_pulled = 0
    for seed in range(2, 80, 3):
        world = check(seed, FAULTS["none"])
        for outcome in world.outcomes.values():
            num_refused += any(isinstance(error, HandoffLostError) for error in outcome.errors)
            num_pulled += any(sink.num_pulled_bytes for sink in outcome.sinks) and bool(outcome.num_arrived)
    assert num_refused > 5
    assert num_pulled > 20
