"""A `Recorder` of decode graphs without CUDA: a replay computes anew, from wherever the recorded batch lay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weir.engine.decode_graphs import Recording


class ReplayingRecorder:
    def record(self, compute: Callable[[], torch.Tensor]) -> Recording:
        output = compute()

        def replay() -> None:
            output.copy_(compute())

        return Recording(replay, output)
