from __future__ import annotations

from weir.core.request import HandoffId, HandoffKey, RequestId, SamplingParams, SequenceRequest


def _request(**fields: object) -> SequenceRequest:
    return SequenceRequest(
        request_id=RequestId("r"),
        sequence_id="s",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=10),
        **fields,  # type: ignore[arg-type]
    )


def test_resumed_output_is_known_but_counts_as_output() -> None:
    request = _request(resumed_output_token_ids=(4, 5))
    assert request.num_known_tokens == 5
    assert request.max_total_tokens == 13


def test_keys_order_by_hand_off_then_epoch() -> None:
    keys = [HandoffKey(HandoffId(name), epoch) for name, epoch in (("b", 0), ("a", 2), ("a", 1))]
    assert sorted(keys) == [keys[2], keys[1], keys[0]]
