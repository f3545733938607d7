"""Which kind of GPU this torch computes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def options(nvidia: Mapping[str, int], amd: Mapping[str, int]) -> Mapping[str, int]:
    """The launch options of the GPUs that torch is built for."""
    return nvidia if torch.version.hip is None else amd
