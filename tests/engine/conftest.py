"""Fixtures of the engine's tests."""

from tests.fakes.real_model import real_model_dir
from tests.fakes.tiny_model import make_tiny_model, tiny_model_dir

__all__ = ["make_tiny_model", "real_model_dir", "tiny_model_dir"]
