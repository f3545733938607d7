from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.server_process import ServerFailed, server_process

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(str(child.pid).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DEAF = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT,)]; time.sleep(600)"


def _python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code.replace("{", "{{").replace("}", "}}"), "{port}")


def _is_running(pid: int) -> bool:
    """A zombie, which only waits to be reaped, is not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_server_is_ready_weighed_and_ended_with_its_children() -> None:
    with server_process(_python(SERVER), ready_path="/health", timeout_s=30) as server:
        child = int(httpx.get(f"{server.url}/health").text)
        memory = server.memory_mib()
        assert set(memory) == {server.pid, child}
        assert min(memory.values()) > 1
        assert server.start_s > 0
    assert not _is_running(server.pid)
    assert not _is_running(child)


def test_a_block_that_raises_ends_the_server() -> None:
    with pytest.raises(KeyError), server_process(_python(SERVER), ready_path="/health", timeout_s=30) as server:
        raise KeyError
    assert not _is_running(server.pid)


def test_a_server_that_ends_early_says_its_last_words() -> None:
    with (
        pytest.raises(ServerFailed, match="ended with code 3: no such model"),
        server_process(_python("import sys; print('no such model'); sys.exit(3)"), ready_path="/", timeout_s=30),
    ):
        pass


def test_a_server_that_is_never_ready_is_given_up() -> None:
    with (
        pytest.raises(ServerFailed, match=r"not ready after 0\.5 s"),
        server_process(_python(SERVER), ready_path="/ready", timeout_s=0.5),
    ):
        pass


def test_a_server_hears_an_interrupt_even_where_its_parent_ignores_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        started_s = time.monotonic()
        with server_process(_python(SERVER), ready_path="/health", timeout_s=30, stop_timeout_s=600):
            pass
        assert time.monotonic() - started_s < 60
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_server_deaf_to_an_interrupt_is_killed() -> None:
    with (
        pytest.raises(ServerFailed, match="not ready"),
        server_process(_python(DEAF), ready_path="/", timeout_s=0.5, stop_timeout_s=0.2),
    ):
        pass
