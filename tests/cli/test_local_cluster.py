from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from weir.cli.local_cluster import LocalCluster, count_gpus, usable_cores
from weir.cli.preparation import PreparedModel
from weir.cli.run_directory import NUM_KEPT, RunDirectory
from weir.cli.supervisor import ProcessSpec
from weir.cli.up_config import UpConfig

MODEL = PreparedModel(model_dir=Path("/models/m"), name="m")


def _cluster(tmp_path: Path, **settings: object) -> LocalCluster:
    return LocalCluster.create(UpConfig(**settings), RunDirectory(path=tmp_path, sockets=tmp_path))  # type: ignore[arg-type]


def _option(spec: ProcessSpec, name: str) -> str:
    return spec.argv[list(spec.argv).index(name) + 1]


def test_workers_of_both_roles_have_their_own_names_and_ports(tmp_path: Path) -> None:
    specs = list(_cluster(tmp_path, prefill=2, decode=3).workers(MODEL))
    assert [spec.name for spec in specs] == ["decode-1", "decode-2", "decode-3", "prefill-1", "prefill-2"]
    assert len({_option(spec, "--metrics-port") for spec in specs}) == 5
    assert len({_option(spec, "--worker-id") for spec in specs}) == 5
    assert {_option(spec, "--port") for spec in specs} == {"0"}
    assert {_option(spec, "--model-dir") for spec in specs} == {"/models/m"}


@pytest.mark.parametrize(
    ("num_gpus", "settings", "share"),
    [
        (1, {}, "0.45"),
        (2, {}, "0.9"),
        (2, {"decode": 2}, "0.45"),
        (1, {"decode": 2}, "0.3"),
        (1, {"aggregated": True}, "0.9"),
        (1, {"gpu_memory_utilization": 0.2}, "0.2"),
    ],
)
def test_workers_that_outnumber_the_gpus_share_them(
    tmp_path: Path, num_gpus: int, settings: dict[str, object], share: str
) -> None:
    cluster = replace(_cluster(tmp_path, **settings), num_gpus=num_gpus)
    assert {_option(spec, "--gpu-memory-utilization") for spec in cluster.workers(MODEL)} == {share}


def test_gpus_are_counted_and_a_machine_without_any_says_nothing_of_them(tmp_path: Path) -> None:
    assert count_gpus(tmp_path / "none") == 0
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert count_gpus(tmp_path) == 2
    cluster = replace(_cluster(tmp_path), num_gpus=0)
    assert not any("--gpu-memory-utilization" in spec.argv for spec in cluster.workers(MODEL))


def test_aggregated_has_no_prefill_worker(tmp_path: Path) -> None:
    assert [spec.name for spec in _cluster(tmp_path, aggregated=True).workers(MODEL)] == ["decode-1"]


def test_prefill_yields_to_decode(tmp_path: Path) -> None:
    decode, prefill = _cluster(tmp_path).workers(MODEL)
    assert "--nice" not in decode.argv
    assert _option(prefill, "--nice") == "10"
    assert prefill.environment["OMP_WAIT_POLICY"] == decode.environment["OMP_WAIT_POLICY"] == "passive"


def test_all_workers_share_a_secret_that_no_argument_shows(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    specs = [*cluster.workers(MODEL), cluster.gateway(MODEL)]
    assert {spec.environment["WEIR_TRANSFER_SECRET"] for spec in specs} == {cluster.secret}
    assert not any(cluster.secret in word for spec in specs for word in spec.argv)
    assert cluster.secret != _cluster(tmp_path).secret


def test_api_keys_reach_the_gateway_and_no_argument_shows_them(tmp_path: Path) -> None:
    spec = _cluster(tmp_path, api_keys=("k-1", "k-2")).gateway(MODEL)
    assert spec.environment["WEIR_API_KEYS"] == "k-1,k-2"
    assert not any("k-1" in word for word in spec.argv)


def test_the_embedded_redis_is_where_everybody_looks(tmp_path: Path) -> None:
    cluster = _cluster(tmp_path)
    path = _option(cluster.redis(), "--unixsocket")
    for spec in (*cluster.workers(MODEL), cluster.gateway(MODEL)):
        assert _option(spec, "--redis-url") == f"unix://{path}"


def test_a_given_redis_is_used_and_blocks_travel_over_tcp(tmp_path: Path) -> None:
    decode, prefill = _cluster(tmp_path, redis="redis://there:1").workers(MODEL)
    assert _option(decode, "--redis-url") == _option(prefill, "--redis-url") == "redis://there:1"
    assert "--transfer-listen" not in prefill.argv


def test_settings_of_the_workers_are_passed_on(tmp_path: Path) -> None:
    settings = {"block_size": 32, "max_model_len": 512, "kv_cache_memory_bytes": 7}
    for spec in _cluster(tmp_path, **settings).workers(MODEL):
        assert _option(spec, "--block-size") == "32"
        assert _option(spec, "--max-model-len") == "512"
        assert _option(spec, "--kv-cache-memory-bytes") == "7"
    assert "--max-model-len" not in next(_cluster(tmp_path).workers(MODEL)).argv


@pytest.mark.parametrize("count", [1, 2, 64])
def test_threads_never_exceed_the_cores_nor_fall_to_zero(tmp_path: Path, count: int) -> None:
    cluster = _cluster(tmp_path, prefill=count, decode=count)
    assert 1 <= cluster.num_threads <= usable_cores()
    assert cluster.num_threads * 2 * count <= max(2 * usable_cores(), 2 * count)


def test_a_gateway_on_every_interface_is_probed_on_loopback() -> None:
    assert UpConfig(host="0.0.0.0", port=80).url == "http://127.0.0.1:80"
    assert UpConfig(host="::1", port=80).url == "http://[::1]:80"


def test_a_run_directory_is_private_and_old_ones_go(tmp_path: Path) -> None:
    for number in range(NUM_KEPT + 3):
        (tmp_path / "run" / f"2000-{number:02}").mkdir(parents=True)
    run = RunDirectory.create(tmp_path)
    assert run.path.stat().st_mode & 0o777 == 0o700
    left = sorted(entry.name for entry in (tmp_path / "run").iterdir())
    assert len(left) == NUM_KEPT + 1
    assert left[0] == "2000-03"
    run.remove_sockets()


def test_the_directory_of_a_run_that_goes_on_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(time, "strftime", lambda _: "20000101-000000-")
        running = RunDirectory.create(tmp_path)
    (running.path / "redis.sock").touch()
    for _ in range(NUM_KEPT + 3):
        RunDirectory.create(tmp_path).remove_sockets()
    assert (running.path / "redis.sock").exists()
    running.remove_sockets()
    for _ in range(2):
        RunDirectory.create(tmp_path).remove_sockets()
    assert not running.path.exists()
    assert len(list((tmp_path / "run").iterdir())) == NUM_KEPT + 1


def test_sockets_move_where_their_path_fits(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / ("long" * 30))
    assert run.sockets != run.path
    assert len(str(run.sockets / "prefill-64.sock")) < 104
    run.remove_sockets()
    assert not run.sockets.exists()
    assert run.path.exists()
