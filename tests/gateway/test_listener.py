import socket

import pytest

from gateway.listener import SEND_BUFFER_BYTES, open_listener


def test_connections_inherit_the_bounds_for_clients_that_stop_reading():
    with open_listener("127.0.0.1", 0, stall_timeout_s=1.5) as listener:
        with socket.create_connection(listener.getsockname()):
            listener.setblocking(True)
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500


def test_a_busy_port_is_the_callers_error():
    with open_listener("127.0.0.1", 0, stall_timeout_s=1) as listener:
        with pytest.raises(OSError, match="in use"):
            open_listener("127.0.0.1", listener.getsockname()[1], stall_timeout_s=1)


def test_ipv6_is_listened_on_by_its_address():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with open_listener("::1", 0, stall_timeout_s=1) as listener:
        assert listener.family is socket.AF_INET6
