"""Models that the whole suite shares."""

from __future__ import annotations

from tests.fakes.real_model import real_model_dir
from tests.fakes.tiny_model import tiny_model_dir

__all__ = ["real_model_dir", "tiny_model_dir"]
