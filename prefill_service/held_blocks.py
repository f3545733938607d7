"""How many KV blocks a prefill worker may have computed or held for others at one moment.

A prompt takes its share before it is computed and gives it back when the last of its holds has ended. Whoever does not
get its share waits in order of arrival; the line is bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque

from weir.core.errors import CapacityExceededError, OverloadedError


class HeldBlockBudget:
    """A first-come, first-served share of `max_blocks`.

    Args:
        max_waiting: prompts that may wait; the next one is refused.
        retry_after_s: what a refused caller is told.
    """

    def __init__(self, max_blocks: int, *, max_waiting: int, retry_after_s: float = 1.0) -> None:
        self._max_blocks = max_blocks
        self._max_waiting = max_waiting
        self._retry_after_s = retry_after_s
        self._num_taken = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_taken(self) -> int:
        """Blocks given out."""
        return self._num_taken

    @property
    def num_waiting(self) -> int:
        """Prompts in the line."""
        return len(self._line)

    async def take(self, num_blocks: int) -> None:
        """Wait for `num_blocks`; the caller gives them back with `give_back`.

        Raises:
            CapacityExceededError: more than there will ever be.
            OverloadedError: the line is full.
        """
        if num_blocks > self._max_blocks:
            raise CapacityExceededError(
                f"the prompt needs {num_blocks} KV blocks, above the {self._max_blocks} that this worker may hold "
                "for hand-offs (max_held_blocks)",
                hop="prefill",
            )
        if not self._line and self._fits(num_blocks):
            self._num_taken += num_blocks
            return
        if len(self._line) >= self._max_waiting:
            raise OverloadedError(
                f"{len(self._line)} prompts wait for held KV blocks already, the most that may",
                hop="prefill",
                retry_after_s=self._retry_after_s,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((num_blocks, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # whoever stood behind may fit
            else:  # its turn came in the same moment
                self.give_back(num_blocks)
            raise

    def give_back(self, num_blocks: int) -> None:
        """Return a share; whoever is next in line and fits now goes on."""
        self._num_taken -= num_blocks
        assert self._num_taken >= 0, "more blocks given back than were taken"
        self._admit()

    def _fits(self, num_blocks: int) -> bool:
        return self._num_taken + num_blocks <= self._max_blocks

    def _admit(self) -> None:
        self._line = deque(place for place in self._line if not place[1].cancelled())
        while self._line and self._fits(self._line[0][0]):
            num_blocks, turn = self._line.popleft()
            self._num_taken += num_blocks
            turn.set_result(None)
