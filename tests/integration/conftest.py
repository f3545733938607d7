"""Models and the system that the whole suite shares."""

from __future__ import annotations

from tests.fakes.real_model import real_model_dir
from tests.fakes.tiny_model import tiny_model_dir
from tests.integration.real_cluster import real, running_cluster

__all__ = ["real", "real_model_dir", "running_cluster", "tiny_model_dir"]
