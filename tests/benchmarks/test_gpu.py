"""The dry run of `benchmarks.gpu` from its command line, what becomes of sections that fail, and what is told of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.floor import Floor, Peaks
from benchmarks.gpu import SECTIONS, measure
from benchmarks.gpu_record import Card, Record, Row, show_figure
from benchmarks.gpu_section import Section, Situation, processes_of
from benchmarks.gpu_services import HandoffTimes, Load, handoff_row, sample_sum
from benchmarks.kernel_cases.rows import RmsNorm
from benchmarks.kernel_cases.table import kernel_cases
from benchmarks.kernels_page import page
from kernels.gpu.rms_norm import rms_norm_triton

ROOT = Path(__file__).parents[2]
CARD = Card(name="a card", driver="1", python="3", torch="2", triton="3", transformers="5")


def run_script(*options: str, timeout_s: float = 280.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


HERE = tuple(section.name for section in SECTIONS if section.name not in ("services", "transformers"))
"""What takes no processes beside its own, which start for half a minute."""


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """One of the sections of `HERE`."""
    output = tmp_path_factory.mktemp("dry") / "record.json"
    done = run_script("--dry-run", "--output", str(output), "--only", *HERE)
    return done, json.loads(output.read_text())


def check_dry_run(done: subprocess.CompletedProcess[str], record: dict[str, Any], sections: set[str]) -> None:
    assert [row for row in record["rows"] if row["failure"]] == [], done.stderr[-2000:]
    assert done.returncode == 0, done.stdout
    assert record["skipped"] == {}
    assert {row["section"] for row in record["rows"]} == sections
    assert "no figure means anything" in done.stdout


def test_a_dry_run_goes_through_its_sections(
    dry_run: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    check_dry_run(*dry_run, set(HERE))


@pytest.mark.full
def test_a_dry_run_serves_over_http_and_by_transformers(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    done = run_script("--dry-run", "--output", str(output), "--only", "services", "transformers")
    check_dry_run(done, json.loads(output.read_text()), {"card", "services", "transformers"})


def test_a_dry_run_holds_every_kind_of_kernel_against_its_plain_form(
    dry_run: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    rows = [row for row in dry_run[1]["rows"] if row["section"] == "kernels"]
    assert {row["name"].partition(",")[0] for row in rows} == {case.op for case in kernel_cases()}
    assert all(row["error"] <= row["tolerance"] for row in rows)


def test_the_record_says_what_ran_where(dry_run: tuple[subprocess.CompletedProcess[str], dict[str, Any]]) -> None:
    record = dry_run[1]
    assert set(record) == {"schema", *(field.name for field in fields(Record))}
    assert all(set(row) == {field.name for field in fields(Row)} for row in record["rows"])
    assert record["is_dry"] is True
    assert record["card"]["torch"] == torch.__version__


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run_script("--only", "card")
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 1
    assert "no CUDA device" in done.stdout
    assert done.stderr == ""


def run_section(module: str, scratch: Path, *, is_resumable: bool, limit_s: float = 60.0) -> list[Row]:
    section = Section(
        name="section", module=f"tests.benchmarks.{module}", limit_s=limit_s, least_s=0, is_resumable=is_resumable
    )
    found = section.run(Situation(device="cuda:0", scratch=scratch), processes_of((section,)), left_s=600.0)
    return [row for row in found if isinstance(row, Row)]


def test_a_section_goes_on_after_what_failed(tmp_path: Path) -> None:
    rows = run_section("failing_section", tmp_path, is_resumable=True)
    assert [(row.name, row.figure) for row in rows] == [("one", 1.0), ("two", None), ("three", None), ("four", 1.0)]
    assert rows[1].failure == "ValueError: no such thing"
    assert rows[2].failure == "its process ended with code 7"


def test_a_section_that_is_not_resumable_ends_with_its_failure(tmp_path: Path) -> None:
    rows = run_section("failing_section", tmp_path, is_resumable=False)
    assert [row.name for row in rows] == ["one", "two"]


def test_a_section_is_ended_when_its_time_is_up(tmp_path: Path) -> None:
    started_s = time.monotonic()
    (row,) = run_section("endless_section", tmp_path, is_resumable=True, limit_s=5.0)
    assert (row.name, row.failure) == ("endless", "its time was up")
    assert time.monotonic() - started_s < 30


def test_what_the_budget_has_no_room_for_is_said(tmp_path: Path) -> None:
    record = measure(SECTIONS, Situation(device="cpu", scratch=tmp_path), budget_s=0.0)
    assert record.rows == []
    assert set(record.skipped) == {section.name for section in SECTIONS}
    assert "skipped: " in record.table()


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    row = Row(section="kernels", name="a", figure=1.5, unit="s", error=0.25, tolerance=0.5, share=0.5, goal=0.4)
    record = Record(date="2026-11-30", commit="abc", is_dry=False, card=CARD, rows=[row], skipped={"engine": "late"})
    record.save(tmp_path / "sub/record.json")
    assert Record.load(tmp_path / "sub/record.json") == record
    (tmp_path / "old.json").write_text(json.dumps({**record.to_dict(), "schema": 0}))
    with pytest.raises(ValueError, match="schema"):
        Record.load(tmp_path / "old.json")


@pytest.mark.parametrize(
    ("row", "is_right", "meets_goal"),
    [
        (Row(section="s", name="n"), None, None),
        (Row(section="s", name="n", error=0.1, tolerance=0.1, share=0.9, goal=0.8), True, True),
        (Row(section="s", name="n", error=0.2, tolerance=0.1, share=0.7, goal=0.8), False, False),
        (Row(section="s", name="n", error=float("nan"), tolerance=0.1), False, None),
        (Row(section="s", name="n", share=0.04, goal=0.05, is_ceiling=True), None, True),
        (Row(section="s", name="n", share=0.06, goal=0.05, is_ceiling=True), None, False),
        (Row(section="s", name="n", failure="gone", error=0.0, tolerance=0.1), False, None),
    ],
)
def test_a_row_knows_whether_it_is_right_and_good(row: Row, is_right: bool | None, meets_goal: bool | None) -> None:
    assert (row.is_right, row.meets_goal) == (is_right, meets_goal)
    record = Record(date="d", commit="c", is_dry=False, card=CARD, rows=[row])
    assert record.is_right is (is_right is not False)


def test_the_table_says_what_was_missed_and_what_was_wrong() -> None:
    good = Row(section="a", name="x", figure=2e-3, unit="s", share=0.5, goal=0.8, error=1e-3, tolerance=1e-2)
    bad = Row(section="a", name="y", figure=1234.5, unit="tok/s", error=0.5, tolerance=0.01, remark="a | b")
    record = Record(date="d", commit="c", is_dry=False, card=CARD, rows=[good, bad])
    *_, first, second = record.table().splitlines()
    assert first == "| a | x |  | 2 ms | 50.0% | ≥ 80% MISSED | 1.0e-03 / 1e-02 |  |"
    assert second == "| a | y |  | 1,234 tok/s | – | – | 5.0e-01 / 1e-02 | WRONG; a / b |"


def test_a_dry_record_shows_no_shares() -> None:
    row = Row(section="a", name="x", figure=1.0, unit="s", share=0.5, goal=0.8)
    assert "50" not in Record(date="d", commit="c", is_dry=True, rows=[row]).table()


@pytest.mark.parametrize(
    ("figure", "unit", "shown"),
    [
        (None, "s", "–"),
        (2.5, "s", "2.5 s"),
        (0.0123, "s", "12.3 ms"),
        (4.56e-6, "s", "4.56 us"),
        (0.5, "GB/s", "0.5 GB/s"),
    ],
)
def test_figures_are_shown_in_what_suits_them(figure: float | None, unit: str, shown: str) -> None:
    assert show_figure(figure, unit) == shown


def test_peaks_are_those_of_the_card_and_shares_are_of_them() -> None:
    rows = [
        Row(section="card", name="copy", figure=1000.0, unit="GB/s"),
        Row(section="card", name="bfloat16 product", figure=2.0, unit="TFLOP/s"),
    ]
    record = Record(date="d", commit="c", is_dry=False, rows=rows)
    assert record.peaks == Peaks(bytes_per_s=1e12, flops_per_s=2e12)
    assert Record(date="d", commit="c", is_dry=False, rows=rows[:1]).peaks is None
    situation = Situation(device="cuda:0", scratch=Path(), peaks=record.peaks)
    assert situation.share(Floor(num_bytes=10**9), 0.002) == pytest.approx(0.5)
    assert Situation(device="cuda:0", scratch=Path()).share(Floor(num_bytes=1), 1.0) is None


def test_the_page_has_the_figures_of_a_record() -> None:
    (case, other) = (case for case in kernel_cases() if isinstance(case.work, RmsNorm))
    row = Row(section="kernels", name=case.title, figure=5e-5, unit="s", share=0.9, error=0.0, tolerance=0.01)
    record = Record(date="2026-12-24", commit="c", is_dry=False, card=CARD, rows=[row])
    text = page((case, other), {"triton": "3", "kernels": {}}, record)
    lines = [line for line in text.splitlines() if line.startswith(f"| `{case.op}`, ")]
    assert lines[0].endswith("| 50 us | 90% | a card | 2026-12-24 |")
    assert "not yet measured" in lines[1]


def test_metrics_are_summed_over_labels() -> None:
    text = 'a_sum{hop="x",m="1"} 2\na_sum{hop="x",m="2"} 3\na_sum{hop="y",m="1"} 5\nb_sum 7\n'
    assert sample_sum(text, "a_sum", hop="x") == 5
    assert sample_sum(text, "a_sum") == 10
    assert sample_sum(text, "c_sum") == 0


def test_the_share_of_the_hand_off_is_what_it_adds_to_the_time_to_the_first_token() -> None:
    load = Load(streams=1, num_requests=4, input_tokens=8192, output_tokens=64)
    before = HandoffTimes(ttft_s=1.0, exposed_s=0.5, num_handoffs=1)
    row = handoff_row(load, HandoffTimes(ttft_s=3.0, exposed_s=0.58, num_handoffs=5).since(before))
    assert row.figure == pytest.approx(0.02)
    assert row.share == pytest.approx(0.04)
    assert row.meets_goal
    assert handoff_row(load, before.since(before)).is_right is False


@pytest.mark.gpu
def test_kernels_are_timed_by_a_graph_on_a_gpu() -> None:
    from benchmarks.gpu_timer import timer_of

    device = torch.device("cuda")
    hidden, weight = torch.ones(64, 64, device=device), torch.ones(64, device=device)
    assert 0 < timer_of(device).seconds([lambda: rms_norm_triton(hidden, weight, 1e-5)]) < 1e-2
