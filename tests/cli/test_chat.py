"""Against a real HTTP server that speaks the few lines a gateway would."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from weir.cli.__main__ import main
from weir.cli.chat import ChatConfig, Conversation
from weir.core.errors import UnavailableError


class Gateway(ThreadingHTTPServer):
    """Answers every chat with `lines`, as server-sent events, or with `status` and an error."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lines: list[str] = []
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def say(self, *pieces: str) -> None:
        events = [json.dumps({"choices": [{"index": 0, "delta": {"content": piece}}]}) for piece in pieces]
        self.lines = [": keep-alive", *(f"data: {event}" for event in events), "data: [DONE]"]


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.keys.append(self.headers.get("Authorization"))
        self.send_response(self.server.status)
        self.end_headers()
        if self.server.status == 200:
            self.wfile.write("".join(f"{line}\n\n" for line in self.server.lines).encode())
        else:
            self.wfile.write(b'{"error": {"message": "model: there is no such model"}}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_one_question_prints_one_answer(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.say("A low", " dam.")
    argv = ["chat", "--url", gateway.url, "--system", "Be brief.", "--api-key", "k", "What", "is", "a weir?"]
    assert main(argv) == 0
    assert capsys.readouterr().out == "A low dam.\n"
    assert _contents(gateway.bodies[0]) == ["Be brief.", "What is a weir?"]
    assert gateway.keys == ["Bearer k"]


def test_a_conversation_remembers_what_was_said(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.say("Yes.")
    monkeypatch.setattr("sys.stdin", io.StringIO("One?\n\nTwo?\n"))
    assert main(["chat", "--url", gateway.url]) == 0
    assert [_contents(body) for body in gateway.bodies] == [["One?"], ["One?", "Yes.", "Two?"]]
    assert capsys.readouterr().out == "Yes.\nYes.\n"


def test_a_stopped_answer_keeps_what_was_received(gateway: Gateway) -> None:
    gateway.say("One,", " two,", " three")
    with httpx.Client(base_url=gateway.url) as client:
        conversation = Conversation(client, ChatConfig(url=gateway.url))
        pieces = conversation.ask("Count.")
        assert [next(pieces), next(pieces)] == ["One,", " two,"]
        pieces.close()
    assert [message["content"] for message in conversation.messages] == ["Count.", "One, two,"]


def test_a_failure_in_mid_answer_is_the_gateways_own_words(gateway: Gateway) -> None:
    gateway.say("One,")
    gateway.lines[-1] = 'data: {"error": {"message": "the decode worker is gone"}}'
    with httpx.Client(base_url=gateway.url) as client:
        conversation = Conversation(client, ChatConfig(url=gateway.url))
        with pytest.raises(UnavailableError, match="the decode worker is gone"):
            list(conversation.ask("Count."))


def test_a_refusal_leaves_no_trace_in_the_conversation(gateway: Gateway) -> None:
    gateway.status = 404
    with httpx.Client(base_url=gateway.url) as client:
        conversation = Conversation(client, ChatConfig(url=gateway.url))
        with pytest.raises(UnavailableError, match=r"no such model \(HTTP 404\)"):
            list(conversation.ask("Hello?"))
    assert conversation.messages == []


def test_no_gateway_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "Hello?"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("weir chat: no gateway answers at http://127.0.0.1:9")
    assert err.count("\n") == 1


def test_a_refused_question_of_a_pipe_is_told_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("One?\n"))
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2


def test_bytes_of_a_pipe_that_are_no_text_are_replaced(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.say("Yes.")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff?\n"), errors="surrogateescape"))
    assert main(["chat", "--url", gateway.url]) == 0
    assert _contents(gateway.bodies[0]) == ["\ufffd?"]


@pytest.mark.parametrize("url", ["http://[::1", "localhost:8000", "ftp://a", "http://"])
def test_what_is_no_url_is_refused_by_name(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["chat", "--url", url, "Hello?"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"weir chat: url: {url!r} is")
    assert err.count("\n") == 1


def test_a_reader_that_has_gone_ends_it_quietly(gateway: Gateway) -> None:
    gateway.say(*["words "] * 20_000)
    command = [sys.executable, "-m", "weir.cli", "chat", "--url", gateway.url, "Talk."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == b"words"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
