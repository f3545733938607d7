"""Credit in bytes: how much payload of one hand-off may be under way. Counts only; knows no frames and no sockets."""

from __future__ import annotations

from weir.core.errors import TransferProtocolError

MAX_CREDIT_BYTES = 1 << 40
"""No sane sink grants more; a larger sum is a peer's fault."""


class SendCredit:
    """The source's side: what it may still send. Never negative, never above `MAX_CREDIT_BYTES`."""

    __slots__ = ("_available_bytes",)

    def __init__(self, initial_bytes: int) -> None:
        self._available_bytes = 0
        self.give(initial_bytes)

    @property
    def available_bytes(self) -> int:
        return self._available_bytes

    def covers(self, size_bytes: int) -> bool:
        return size_bytes <= self._available_bytes

    def take(self, size_bytes: int) -> None:
        """Use up credit that `covers` has promised."""
        assert 0 <= size_bytes <= self._available_bytes, (size_bytes, self._available_bytes)
        self._available_bytes -= size_bytes

    def give(self, size_bytes: int) -> None:
        """Add what the sink has given back.

        Raises:
            TransferProtocolError: the sum is beyond any window.
        """
        if size_bytes < 0 or self._available_bytes + size_bytes > MAX_CREDIT_BYTES:
            raise TransferProtocolError(f"credit of {size_bytes} bytes leads above {MAX_CREDIT_BYTES}", hop="transfer")
        self._available_bytes += size_bytes


class ReceiveWindow:
    """The sink's side: what it has granted and not got yet, and what it can give back.

    The first grant is small, since those bytes must be staged until the sink is there; `open` raises it to the window.
    Credit is given back in quarters of the window, so that its frames are few.
    """

    __slots__ = ("_granted_bytes", "_owed_bytes", "_window_bytes")

    def __init__(self, initial_bytes: int) -> None:
        self._window_bytes = initial_bytes
        self._granted_bytes = initial_bytes
        self._owed_bytes = 0

    @property
    def granted_bytes(self) -> int:
        """Bytes that may still arrive."""
        return self._granted_bytes

    @property
    def owed_bytes(self) -> int:
        """Bytes that are free again and not given back."""
        return self._owed_bytes

    def receive(self, size_bytes: int) -> None:
        """Account for a payload that begins to arrive.

        Raises:
            TransferProtocolError: it is beyond what was granted.
        """
        if size_bytes > self._granted_bytes:
            raise TransferProtocolError(
                f"{size_bytes} bytes came with a credit of {self._granted_bytes} left", hop="transfer"
            )
        self._granted_bytes -= size_bytes

    def free(self, size_bytes: int) -> None:
        """The memory that so many arrived bytes took may be taken again: they are owed to the source from now on."""
        self._owed_bytes += size_bytes

    def open(self, window_bytes: int) -> None:
        """Raise the window; the difference is owed to the source from now on."""
        self._owed_bytes += max(0, window_bytes - self._window_bytes)
        self._window_bytes = max(self._window_bytes, window_bytes)

    def give_back(self) -> int:
        """Bytes to grant now: all that is owed, or 0 while that is less than a quarter of the window."""
        if self._owed_bytes == 0 or self._owed_bytes * 4 < self._window_bytes:
            return 0
        size_bytes, self._owed_bytes = self._owed_bytes, 0
        self._granted_bytes += size_bytes
        return size_bytes
