from __future__ import annotations

import socket

import pytest

from weir.core.errors import ConfigError
from weir.runtime.ports import check_port_free


def test_a_busy_port_names_the_setting_and_a_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_port_free("127.0.0.1", port, "grpc_port")
    assert caught.value.message == f"grpc_port: {port} is in use on 127.0.0.1; choose another with --grpc-port"
    check_port_free("127.0.0.1", port, "grpc_port")


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"port: cannot listen on 203\.0\.113\.1:80"):
        check_port_free("203.0.113.1", 80, "port")
