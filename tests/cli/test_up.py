"""`weir up` as a person runs it: a process in a terminal's place, with a tiny random model."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.cli.weir_up import weir_up
from tests.fakes.tiny_model import write_tiny_model
from weir.cli.__main__ import main
from weir.cli.preparation import PreparedModel
from weir.cli.probes import check_redis_answers, free_ports
from weir.cli.up import _ready_lines
from weir.cli.up_config import UpConfig
from weir.core.errors import ConfigError

OPTIONS = ("--kv-cache-memory-bytes", "8MiB", "--max-model-len", "512")


async def _complete(client: httpx.AsyncClient) -> list[int]:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    ids: list[int] = choice["token_ids"]
    assert len(ids) == 8
    return ids


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_it_serves_heals_and_drains() -> None:
    with tempfile.TemporaryDirectory(prefix="weir-") as folder:
        model_dir = write_tiny_model(Path(folder) / "tiny")
        async with weir_up(*OPTIONS, home=Path(folder) / "home", model=model_dir) as running:
            await running.until("weir: ready after")
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
                (served,) = (await client.get("/v1/models")).json()["data"]
                assert served["max_model_len"] == 512, "the workers' limit, not the model's"
                before = await _complete(client)
                running.kill("prefill_service")
                assert "SIGKILL; starts again" in await running.until("prefill-1 was ended")
                assert await _complete(client) == before
                await running.until("prefill-1 ready")
                assert await _complete(client) == before
            running.process.send_signal(signal.SIGINT)
            await running.until("weir: stopped")
            assert await running.process.wait() == 0
        assert not list((Path(folder) / "home").glob("run/*/*.sock"))


def test_a_busy_port_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["up", "--port", str(port), "--home", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err == f"weir up: port: {port} is in use on 127.0.0.1; choose another with --port\n"


def test_a_missing_model_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    port, grpc_port = free_ports(2)
    argv = ["--model", "/nowhere.gguf", "--port", str(port), "--grpc-port", str(grpc_port), "--home", str(tmp_path)]
    assert main(["up", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("weir up: /nowhere.gguf: no such model")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_wrong_option_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--decode", "0"]) == 2
    assert capsys.readouterr().err == "weir up: decode: '0' is below the minimum of 1 (from --decode)\n"
    assert main(["up", "--aggregated", "--prefill", "2"]) == 2
    assert capsys.readouterr().err == ("weir up: prefill: aggregated has no prefill workers, and 2 are asked for\n")


def test_a_redis_that_does_not_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    port, grpc_port = free_ports(2)
    ports = ["--port", str(port), "--grpc-port", str(grpc_port)]
    for url, place in (("redis://u:p@127.0.0.1:1/0", "127.0.0.1:1"), ("unix:///nowhere.sock", "/nowhere.sock")):
        assert main(["up", *ports, "--redis", url]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"weir up: redis: nobody answers at {place}: ")
        assert err.count("\n") == 1


def test_a_redis_url_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    port, grpc_port = free_ports(2)
    assert main(["up", "--port", str(port), "--grpc-port", str(grpc_port), "--redis", "redis://localhost:x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("weir up: redis_url 'redis://localhost:x': ")
    assert err.count("\n") == 1


async def test_every_address_of_a_redis_url_is_asked_on_its_own_port() -> None:
    with pytest.raises(ConfigError, match=r"^redis: nobody answers at 127\.0\.0\.1:26379, 127\.0\.0\.1:1: "):
        await check_redis_answers("redis+sentinel://127.0.0.1,127.0.0.1:1/weir")
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await check_redis_answers(f"redis+cluster://127.0.0.1:1,127.0.0.1:{port}")


def test_one_port_for_two_servers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", "8123", "--grpc-port", "8123"]) == 2
    assert capsys.readouterr().err == "weir up: grpc_port: 8123 is the port of HTTP already\n"


def test_an_empty_list_of_keys_is_not_taken_for_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--api-keys", ""]) == 2
    assert capsys.readouterr().err == "weir up: api_keys: --api-keys is empty; nothing is written `none`\n"


def test_the_last_words_name_the_port_and_the_key() -> None:
    model = PreparedModel(name="tiny", model_dir=Path("/m"))
    plain = "\n".join(_ready_lines(UpConfig(), model, 1.0))
    assert "`weir chat` talks" in plain
    assert "KEY" not in plain
    assert "`weir chat --url http://10.0.0.1:8000` talks" in "\n".join(
        _ready_lines(UpConfig(host="10.0.0.1"), model, 1.0)
    )
    locked = "\n".join(_ready_lines(UpConfig(port=9000, api_keys=("k",)), model, 1.0))
    assert "-H 'Authorization: Bearer KEY'" in locked
    assert "`weir chat --url http://127.0.0.1:9000 --api-key KEY` talks" in locked
