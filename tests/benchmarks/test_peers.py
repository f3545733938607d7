from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparison import Kind, Measure
from benchmarks.contenders import Contender, Models, Programs, contenders
from benchmarks.peers import Plan, figures_of, remarks_on, run
from benchmarks.peers_record import PeersRecord
from tests.fakes.tiny_tokenizer import byte_level

SERVER = Path(__file__).with_name("peer_server.py")
PLAN = Plan(num_repetitions=2, workloads=("w1",), begin_s=20.0, request_s=20.0, calm_s=0.0, num_tries=1)


def _peer(name: str, *arguments: str) -> Contender:
    command = (sys.executable, str(SERVER), "{port}", *arguments)
    return Contender(name=name, kind=Kind.PEER, command=command, settings="as it comes")


def _result(**changes: Any) -> dict[str, Any]:
    return {
        "workload": "w3",
        "complete": True,
        "notes": [],
        "num_requests": 64,
        "num_failed": 0,
        "failures": {},
        "output_tokens_per_s": 123.0,
        "goodput_requests_per_s": 0.75,
        **changes,
    }


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


def test_peers_are_measured_in_turn_and_one_that_fails_is_a_row_with_its_reason(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    chosen = [
        _peer("good"),
        _peer("silent", "silent"),
        Contender(name="broken", kind=Kind.PEER, command=(sys.executable, "-c", "exit('no model')"), settings=""),
    ]
    runs = list(run(chosen, PLAN, tokenizer_dir, first=1))
    assert [(one.server, one.repetition) for one in runs] == [
        (name, repetition) for repetition in (1, 2) for name in ("good", "silent", "broken")
    ]
    good, silent, broken = runs[:3]
    assert min(good.figures[key] for key in (Measure.W1, Measure.W1_GOODPUT, Measure.START, Measure.MEMORY)) > 0
    assert Measure.W1 not in silent.figures
    assert any("503" in remark for remark in silent.remarks)
    assert broken.figures == {}
    assert broken.remarks == ["ended with code 1: no model"]
    record = PeersRecord(missing=["other"], runs=runs)
    record.add_servers(chosen)
    record.save(tmp_path / "record.json")
    assert PeersRecord.load(tmp_path / "record.json") == record
    assert record.num_repetitions == 3
    assert "| broken |" in record.page()


def test_a_throughput_comes_with_its_goodput() -> None:
    assert figures_of(_result()) == {Measure.W3: 123.0, Measure.W3_GOODPUT: 0.75}


def test_interference_is_two_tails_and_the_wait_of_the_burst() -> None:
    result = _result(
        workload="w5", alone={"itl_p99_s": 0.05}, burst={"itl_p99_s": 0.14, "ttft_p50_s": None, "sent_s": 3.0}
    )
    assert figures_of(result) == {Measure.W5_ALONE: 0.05, Measure.W5_BURST: 0.14}


def test_a_reader_is_told_of_failures_of_cuts_of_notes_and_of_others() -> None:
    result = _result(complete=False, num_requests=9, num_failed=2, failures={"timeout": 2}, notes=["short answers"])
    assert remarks_on(result, 0.25) == [
        "w3: 2 of 9 requests failed (2 timeout)",
        "w3: cut short after 9 requests",
        "w3: short answers",
        "w3: other processes took 25% of the cores",
    ]
    assert remarks_on(_result(), 0.01) == []


def test_programs_that_are_not_there_are_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    server = tmp_path / "llama-server"
    server.touch(mode=0o755)
    programs = Programs.find()
    assert programs.llama_server == server
    assert {"vllm", "transformers serve"} <= set(programs.missing)
    models = Models(gguf=[tmp_path / "tiny.Q8_0.gguf"], float32_dir=tmp_path, tokenizer_dir=tmp_path)
    names = [contender.name for contender in contenders(programs, models)]
    assert "llama.cpp Q8_0" in names
    assert not any("vLLM" in name for name in names)


def test_a_given_program_goes_before_the_path(tmp_path: Path) -> None:
    assert Programs.find(vllm=tmp_path / "own").vllm == tmp_path / "own"


def test_variants_are_measured_on_the_interference_only(tmp_path: Path) -> None:
    programs = Programs.find(llama_server=tmp_path, vllm=tmp_path, transformers=tmp_path, openvino_python=tmp_path)
    models = Models(gguf=[tmp_path / "tiny.Q4_1.gguf"], float32_dir=tmp_path, tokenizer_dir=tmp_path)
    found = contenders(programs, models)
    assert len({contender.name for contender in found}) == len(found)
    for contender in found:
        assert (contender.workloads == ("w5",)) == (contender.kind in (Kind.PEER_VARIANT, Kind.AGGREGATED_VARIANT))
