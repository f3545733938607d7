"""Every Redis key, formatted in this file and nowhere else.

The prefix carries the version of what the keys hold. The braces are cluster hash tags: keys that one script touches
share a slot. Every key is written with a TTL by the script that writes it (`scripts.py`).
"""

from __future__ import annotations

from weir.core.request import RequestId
from weir.core.worker import WorkerId

PREFIX = "weir:1:"

WORKER_PREFIX = f"{PREFIX}{{workers}}:worker:"
WORKER_INDEX = f"{PREFIX}{{workers}}:index"
"""Sorted set of worker ids by the Redis time at which their registration lapses."""
WORKER_CHANGES = f"{PREFIX}{{workers}}:changes"
"""Stream with an entry for each worker that joined, changed or left."""


def link(token: str) -> str:
    """Written by one process alone, to know that its link to Redis works and that Redis has not lost its data."""
    return f"{PREFIX}link:{{{token}}}"


def worker(worker_id: WorkerId) -> str:
    """Hash: the registration of a worker. One slot for all, so that one script reads them."""
    return f"{WORKER_PREFIX}{worker_id}"


def request(request_id: RequestId) -> str:
    """Hash: the newest record of a request."""
    return f"{PREFIX}request:{{{request_id}}}"


def ownership(request_id: RequestId) -> str:
    """Hash: who holds which blocks of a request. In the request's slot."""
    return f"{PREFIX}ownership:{{{request_id}}}"


def held(worker_id: WorkerId) -> str:
    """Sorted set of the request ids of which a worker holds blocks, by the Redis time at which that ends: a hint."""
    return f"{PREFIX}held:{{{worker_id}}}"


def kv_blocks(worker_id: WorkerId) -> str:
    """Set: the hashes of all blocks in a worker's prefix cache."""
    return f"{PREFIX}{{kv}}:blocks:{worker_id}"


def kv_stream(worker_id: WorkerId) -> str:
    """Stream: changes of `kv_blocks`, numbered. One slot for all workers, so that one blocking read follows them."""
    return f"{PREFIX}{{kv}}:stream:{worker_id}"
