"""Random lives of sequences on two engines, one of them handing off to the other: every output is what it would be
alone, and the laws hold after every move."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.fakes.engine_harness import EngineHarness
from tests.fakes.model_runner import expected_output, make_request
from weir.core.request import FirstToken, SequenceRequest
from weir.engine.claim import Grant

PREFIXES = ([], [5] * 9, [5] * 9 + [7] * 12, [8, 9] * 8)
SAMPLING: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 0.9, "seed": 4, "top_k": 9},
    {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.4, "logprobs": 1},
    {"prompt_logprobs": 0, "ignore_eos": False},
)


class EngineMachine(RuleBasedStateMachine):
    """`source` prefills for `target`; `target` also computes prompts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0
        self.open: dict[str, SequenceRequest] = {}
        self.prefills: dict[str, SequenceRequest] = {}
        self.claims: dict[str, SequenceRequest] = {}
        self.imports: dict[str, SequenceRequest] = {}
        self.abandoned: set[str] = set()
        self.holds: set[str] = set()

    @initialize(
        block_size=st.sampled_from([1, 3, 4]),
        num_tokens=st.integers(70, 140),
        budget=st.integers(6, 40),
        caching=st.booleans(),
    )
    def start(self, block_size: int, num_tokens: int, budget: int, caching: bool) -> None:
        self.source, self.target = (
            EngineHarness(
                block_size=block_size,
                num_blocks=num_tokens // block_size,
                max_num_seqs=5,
                max_num_batched_tokens=budget,
                enable_prefix_caching=caching,
            )
            for _ in range(2)
        )
        self.block_size = block_size

    def make(self, data: st.DataObject) -> SequenceRequest:
        self.num_requests += 1
        prompt = [
            *data.draw(st.sampled_from(PREFIXES)),
            *data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8)),
        ]
        return make_request(
            f"s{self.num_requests}",
            prompt,
            max_tokens=data.draw(st.integers(1, 25)),
            priority=data.draw(st.integers(0, 1)),
            choice_index=data.draw(st.integers(0, 1)),
            **data.draw(st.sampled_from(SAMPLING)),
        )

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        request = self.make(data)
        self.target.submit(request)
        self.open[request.sequence_id] = request

    @rule(data=st.data(), is_wanted_at_once=st.booleans())
    def prefill(self, data: st.DataObject, is_wanted_at_once: bool) -> None:
        request = self.make(data)
        self.source.prefill(request, request.choice_index)
        self.prefills[request.sequence_id] = request
        self.holds.add(f"{request.sequence_id}#{request.choice_index}")
        if isinstance(self.target.engine.claim(request, request.sequence_id), Grant):
            self.claims[request.sequence_id] = request
            if is_wanted_at_once:
                self.start_import(request.sequence_id)

    @rule(count=st.integers(1, 6))
    def step_source(self, count: int) -> None:
        self.source.step(count)

    @rule(count=st.integers(1, 6))
    def step_target(self, count: int) -> None:
        self.target.step(count)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def start_some_import(self, data: st.DataObject) -> None:
        self.start_import(data.draw(st.sampled_from(sorted(self.claims))))

    def start_import(self, name: str) -> None:
        self.target.engine.allocate_claimed(name)
        self.imports[name] = self.claims.pop(name)

    @precondition(lambda self: self.imports)
    @rule(data=st.data())
    def finish_import(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.imports)))
        self.source.run()
        first = self.first_token(name)
        if first is None:
            return
        request = self.imports.pop(name)
        sequence = self.target.engine._sequences[name]
        source_blocks = self.source.progress[name][-1].block_ids
        for index in range(sequence.num_computed_tokens // self.block_size, len(source_blocks)):
            view = self.target.runner.cache.block_view(sequence.block_ids[index])
            view[:] = self.source.runner.cache.block_view(source_blocks[index])
        self.target.engine.activate(name, first, 0)
        self.open[name] = request

    def first_token(self, name: str) -> FirstToken | None:
        heard = self.source.progress.get(name)
        is_held = f"{name}#{self.prefills[name].choice_index}" in self.holds
        if not heard or heard[-1].first_tokens is None or not is_held:
            return None
        (first,) = heard[-1].first_tokens
        return first if first.finish_reason is None else None

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release_hold(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(sorted(self.holds)))
        self.holds.discard(hold)
        self.source.engine.release_hold(hold)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort_open(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.target.engine.abort(name)
        del self.open[name]

    @precondition(lambda self: self.claims or self.imports)
    @rule(data=st.data())
    def abort_import(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({**self.claims, **self.imports})))
        self.target.engine.abort(name)
        if self.imports.pop(name, None):
            self.abandoned.add(name)
        self.claims.pop(name, None)

    @rule()
    def release_abandoned(self) -> None:
        while self.abandoned:
            self.target.engine.release_claim(self.abandoned.pop())

    @precondition(lambda self: self.prefills)
    @rule(data=st.data())
    def abort_prefill(self, data: st.DataObject) -> None:
        self.source.engine.abort(data.draw(st.sampled_from(sorted(self.prefills))))

    @rule()
    def check(self) -> None:
        self.source.engine.check_integrity()
        self.target.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "target"):
            return
        self.check()
        self.release_abandoned()
        for name in [*self.claims, *self.imports]:
            self.target.engine.release_claim(name)
        for hold in self.holds:
            self.source.engine.release_hold(hold)
        self.source.run()
        self.target.run()
        self.target.check_outputs(list(self.open.values()))
        for name, request in self.prefills.items():
            heard = self.source.progress.get(name, [])
            for first in (heard[-1].first_tokens or ()) if heard else ():
                assert first.token_id == expected_output(request)[0][0]
        for harness in (self.source, self.target):
            harness.engine.update_stats()
            assert harness.num_free_blocks == harness.runner.num_blocks, "a block leaked"
            assert harness.errors == {}


TestEngineMachine = EngineMachine.TestCase
