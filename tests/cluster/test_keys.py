from redis.crc import key_slot

from weir.cluster import keys
from weir.core.request import RequestId
from weir.core.worker import WorkerId


def slot(key: str) -> int:
    return key_slot(key.encode())


def test_keys_of_one_request_share_a_slot_and_two_requests_need_not() -> None:
    for request_id in ("r1", "550e8400-e29b", "with {braces}"):
        assert slot(keys.request(RequestId(request_id))) == slot(keys.ownership(RequestId(request_id)))
    assert slot(keys.request(RequestId("r1"))) != slot(keys.request(RequestId("r2")))


def test_what_one_script_or_one_read_touches_shares_a_slot() -> None:
    one, two = WorkerId("w1"), WorkerId("w2")
    assert len({slot(key) for key in (keys.worker(one), keys.worker(two), keys.WORKER_INDEX, keys.WORKER_CHANGES)}) == 1
    assert len({slot(key) for name in (one, two) for key in (keys.kv_blocks(name), keys.kv_stream(name))}) == 1


def test_no_two_kinds_of_key_collide() -> None:
    name = "x"
    every = [
        keys.link(name),
        keys.worker(WorkerId(name)),
        keys.WORKER_INDEX,
        keys.WORKER_CHANGES,
        keys.request(RequestId(name)),
        keys.ownership(RequestId(name)),
        keys.held(WorkerId(name)),
        keys.kv_blocks(WorkerId(name)),
        keys.kv_stream(WorkerId(name)),
    ]
    assert len(set(every)) == len(every)
    assert all(key.startswith(keys.PREFIX) for key in every)
