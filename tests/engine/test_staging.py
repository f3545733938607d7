from __future__ import annotations

import numpy as np
import torch

from weir.engine.staging import ALIGNMENT, Staging

CPU = torch.device("cpu")


def test_arrays_arrive_in_their_shapes_and_dtypes() -> None:
    arrays = [
        np.arange(3),
        np.arange(5, dtype=np.int32),
        np.zeros((0,), np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3),
    ]
    sent = Staging(CPU).send(arrays)
    for tensor, array in zip(sent, arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype


def test_what_was_sent_stays_when_more_is_sent() -> None:
    staging = Staging(CPU)
    sent = [staging.send([np.full(4 << turn, turn)])[0] for turn in range(8)]
    assert [int(tensor.unique()) for tensor in sent] == list(range(8))


def test_arrays_that_do_not_lie_in_order_are_sent_as_they_read() -> None:
    (sent,) = Staging(CPU).send([np.arange(12).reshape(3, 4).T])
    assert sent.tolist() == np.arange(12).reshape(3, 4).T.tolist()


def test_arrays_of_equal_shapes_lie_at_the_same_aligned_places() -> None:
    staging, memory = Staging(CPU), torch.zeros(256, dtype=torch.uint8)
    first = staging.send([np.arange(3), np.arange(5)], into=memory)
    second = staging.send([np.arange(3) + 7, np.arange(5)], into=memory)
    assert [tensor.data_ptr() for tensor in first] == [tensor.data_ptr() for tensor in second]
    assert all((tensor.data_ptr() - memory.data_ptr()) % ALIGNMENT == 0 for tensor in first)
    assert first[0].tolist() == [7, 8, 9]
