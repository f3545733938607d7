"""Whether this process will be able to listen, asked before it loads a model for minutes."""

from __future__ import annotations

import errno
import socket

from weir.core.errors import ConfigError


def check_port_free(host: str, port: int, setting: str) -> None:
    """Raises ConfigError, naming the setting, when somebody listens there or the host is not ours; 0 is always free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as exc:
        flag = "--" + setting.replace("_", "-")
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{setting}: {port} is in use on {host}; choose another with {flag}", param=setting
            ) from exc
        raise cannot_listen(setting, f"{host}:{port}", exc) from exc


def cannot_listen(setting: str, address: str, reason: OSError) -> ConfigError:
    """What is said of an address that cannot be listened on, whichever server wanted to."""
    return ConfigError(f"{setting}: cannot listen on {address}: {reason.strerror or reason}", param=setting)
