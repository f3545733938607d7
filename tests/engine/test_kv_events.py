"""KvEventLog: a net difference of bounded size."""

from __future__ import annotations

from weir.core.block_hash import BlockHash
from weir.engine.kv_events import KvEventLog, KvEvents

A, B, C = (BlockHash(letter * 16) for letter in (b"a", b"b", b"c"))


def opened(capacity: int = 8) -> KvEventLog:
    log = KvEventLog(capacity)
    log.take(())
    return log


def test_first_reader_gets_the_whole_content() -> None:
    log = KvEventLog(8)
    log.record_stored(A)
    assert log.has_news
    assert log.take([A, B]) == KvEvents(stored=(A, B), cleared=True)
    assert not log.has_news


def test_only_the_last_change_of_a_hash_counts() -> None:
    log = opened()
    log.record_stored(A)
    log.record_removed(A)
    log.record_removed(B)
    log.record_stored(B)
    assert log.take(()) == KvEvents(stored=(B,), removed=(A,))


def test_slow_reader_gets_the_content_instead_of_a_long_difference() -> None:
    log = opened(capacity=2)
    for block_hash in (A, B, C):
        log.record_removed(block_hash)
    assert log.take([C]) == KvEvents(stored=(C,), cleared=True)


def test_restart_forgets_the_difference() -> None:
    log = opened()
    log.record_stored(A)
    log.restart()
    assert log.take([B]) == KvEvents(stored=(B,), cleared=True)
