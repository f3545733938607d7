"""Servers for the tests of the cluster floor."""

from tests.fakes.redis_server import redis_cluster, redis_pair, redis_sentinel, redis_server

__all__ = ["redis_cluster", "redis_pair", "redis_sentinel", "redis_server"]
