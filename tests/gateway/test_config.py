"""The gateway's settings: what is refused, and where each one goes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from gateway.config import GatewayConfig, RedisPolicy
from gateway.http_settings import HttpSettings
from weir.core.errors import ConfigError
from weir.runtime.config import describe_config, load_config


def load(tmp_path: Path, *argv: str) -> GatewayConfig:
    return load_config(GatewayConfig, ["--model-dirs", str(tmp_path), *argv], prog="gateway", environ={})


def test_defaults_are_those_of_the_parts_they_go_to(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.http_settings() == HttpSettings()
    assert config.pipeline_settings().renew_interval_s == 5.0
    assert not config.pipeline_settings().needs_redis


def test_every_http_setting_can_be_set(tmp_path: Path) -> None:
    names = {field.name for field in fields(HttpSettings)}
    assert names <= {field.name for field in fields(GatewayConfig)}
    flags = {"api_keys": "k", "cors_origins": "http://a", "trust_request_chat_template": "true"}
    argv = [text for name in names for text in (f"--{name.replace('_', '-')}", flags.get(name, "1234"))]
    changed = load(tmp_path, *argv).http_settings()
    assert all(getattr(changed, name) != getattr(HttpSettings(), name) for name in names)


def test_the_policy_for_a_lost_redis_reaches_the_pipeline(tmp_path: Path) -> None:
    config = load(tmp_path, "--redis-policy", "refuse")
    assert config.redis_policy is RedisPolicy.REFUSE
    assert config.pipeline_settings().needs_redis


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model-dirs", "/absent/model"], "/absent/model"),
        (["--port", "8001"], "grpc_port: 8001"),
        (["--port", "65536"], "65535"),
        (["--max-running-prompts", "0"], "minimum of 1"),
        (["--redis-policy", "panic"], "degrade"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, *argv)


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="model_dirs"):
        load_config(GatewayConfig, [], prog="gateway", environ={})
    with pytest.raises(ConfigError, match="at least one"):
        load_config(GatewayConfig, ["--model-dirs", ","], prog="gateway", environ={})


def test_keys_are_not_shown(tmp_path: Path) -> None:
    described = describe_config(load(tmp_path, "--api-keys", "open-sesame"))
    assert "open-sesame" not in str(described)
