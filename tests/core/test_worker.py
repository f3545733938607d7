from __future__ import annotations

import json

import pytest

from weir.core.kv_layout import KvLayout
from weir.core.worker import Incarnation, Role, WorkerId, WorkerInfo, WorkerLoad, WorkerState

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, kv_dtype="float32")
INFO = WorkerInfo(
    worker_id=WorkerId("prefill-1"),
    incarnation=Incarnation("abc"),
    role=Role.PREFILL,
    state=WorkerState.DRAINING,
    model="tiny",
    control_address="127.0.0.1:1",
    transfer_address="unix:///x.sock",
    layout=LAYOUT,
    fingerprint=LAYOUT.fingerprint("w"),
    max_model_len=64,
    load=WorkerLoad(num_running=1, free_blocks=7, total_blocks=9),
)


def test_a_worker_survives_json() -> None:
    assert WorkerInfo.from_json(INFO.to_json()) == INFO


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"role": "prefill"}', INFO.to_json().replace("draining", "asleep")])
def test_what_no_worker_wrote_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting value|absent|not an object|not a valid"):
        WorkerInfo.from_json(text)


def test_the_wire_form_is_flat_values_for_people_too() -> None:
    fields = json.loads(INFO.to_json())
    assert (fields["role"], fields["state"], fields["load"]["free_blocks"]) == ("prefill", "draining", 7)


def test_what_a_later_version_added_is_ignored_at_every_depth() -> None:
    fields = json.loads(INFO.to_json()) | {"zone": "a", "peers": [{"x": 1}]}
    for part in ("layout", "fingerprint", "load"):
        fields[part]["added"] = {"later": True}
    assert WorkerInfo.from_json(json.dumps(fields)) == INFO


def test_what_an_earlier_version_did_not_write_takes_its_default() -> None:
    fields = json.loads(INFO.to_json())
    del fields["protocol_min"], fields["protocol_max"], fields["load"]["held_blocks"]
    assert WorkerInfo.from_json(json.dumps(fields)) == INFO
