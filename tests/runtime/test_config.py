from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from weir.core.errors import ConfigError
from weir.runtime.config import MASK, child_environment, describe_config, load_config, setting


class Policy(Enum):
    DEGRADE = "degrade"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A process of the tests."""

    model_dir: Path = setting(help="where the model is")
    max_num_seqs: int = setting(64, help="most sequences", minimum=1, maximum=1024)
    memory_bytes: int | None = setting(None, help="KV memory", minimum=1)
    wait_s: float = setting(1.0, help="how long", minimum=0)
    share: float = setting(0.9, help="of the memory", minimum=0, maximum=1)
    is_fast: bool = setting(True, help="hurry")
    hosts: tuple[str, ...] = setting((), help="where")
    policy: Policy = setting(Policy.DEGRADE, help="without Redis")
    device: str = setting("auto", help="where", choices=("auto", "cpu"))
    secret: str | None = setting(None, help="shared", secret=True)


def load(*argv: str, environ: dict[str, str] | None = None) -> Settings:
    return load_config(Settings, ["--model-dir", "/m", *argv], prog="test", environ=environ or {})


def test_defaults_hold_when_nothing_is_given() -> None:
    assert load() == Settings(model_dir=Path("/m"))


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text("max_num_seqs: 3\nshare: 0.3\ndevice: cpu\n")
    environ = {"WEIR_CONFIG": str(file), "WEIR_MAX_NUM_SEQS": "2", "WEIR_SHARE": "0.2"}
    config = load("--max-num-seqs", "1", environ=environ)
    assert (config.max_num_seqs, config.share, config.device, config.is_fast) == (1, 0.2, "cpu", True)


def test_config_flag_wins_over_config_variable(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("max_num_seqs: 5")
    (tmp_path / "b.yaml").write_text("max_num_seqs: 6")
    environ = {"WEIR_CONFIG": str(tmp_path / "a.yaml")}
    assert load("--config", str(tmp_path / "b.yaml"), environ=environ).max_num_seqs == 6


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--memory-bytes", "512MiB"], "memory_bytes", 512 * 2**20),
        (["--memory-bytes", "1.5 GB"], "memory_bytes", 1_500_000_000),
        (["--memory-bytes", "7"], "memory_bytes", 7),
        (["--memory-bytes", "1TiB"], "memory_bytes", 2**40),
        (["--memory-bytes", "0.1TiB"], "memory_bytes", 109951162777),
        (["--memory-bytes", "none"], "memory_bytes", None),
        (["--is-fast"], "is_fast", True),
        (["--is-fast=off"], "is_fast", False),
        (["--no-is-fast"], "is_fast", False),
        (["--hosts", "a, b", "--hosts", "c"], "hosts", ("a", "b", "c")),
        (["--hosts", "a", "b,c"], "hosts", ("a", "b", "c")),
        (["--hosts", "none"], "hosts", ()),
        (["--policy", "refuse"], "policy", Policy.REFUSE),
        (["--share", "1"], "share", 1.0),
        (["--secret", "none"], "secret", None),
    ],
)
def test_text_becomes_the_type_of_the_field(argv: list[str], name: str, value: object) -> None:
    assert getattr(load(*argv), name) == value


def test_file_gives_native_values(tmp_path: Path) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text("hosts: [a, b]\nis-fast: false\nshare: 1\npolicy: refuse\nmemory_bytes: null\nmodel_dir: ~/m\n")
    config = load_config(Settings, ["--config", str(file)], prog="test", environ={})
    assert config.hosts == ("a", "b")
    assert (config.is_fast, config.share, config.policy, config.memory_bytes) == (False, 1.0, Policy.REFUSE, None)
    assert config.model_dir == Path.home() / "m"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-num-seqs", "0"], ["max_num_seqs", "'0'", "minimum of 1", "--max-num-seqs"]),
        (["--max-num-seqs", "2000"], ["max_num_seqs", "maximum of 1024"]),
        (["--max-num-seqs", "1.5"], ["max_num_seqs", "'1.5'", "whole number"]),
        (["--share", "nan"], ["share", "finite number"]),
        (["--share", "inf"], ["share", "finite number"]),
        (["--share", "much"], ["share", "'much'", "number"]),
        (["--memory-bytes", "3 parsecs"], ["memory_bytes", "bytes", "KiB to TiB"]),
        (["--memory-bytes", "9" * 400 + "GiB"], ["memory_bytes", "bytes"]),
        (["--max-num-seqs", "9" * 5000], ["max_num_seqs", "is not a whole number (from"]),
        (["--max-num-seqs", "\u0661\u0662"], ["max_num_seqs", "whole number"]),
        (["--memory-bytes", "9" * 30], ["memory_bytes", "maximum of 1125899906842624"]),
        (["--wait-s", "1e300"], ["wait_s", "'1e300'", "maximum of 31622400"]),
        (["--is-fast=maybe"], ["is_fast", "true or false"]),
        (["--policy", "panic"], ["policy", "degrade, refuse"]),
        (["--device", "tpu"], ["device", "auto, cpu"]),
        (["--unheard-of", "1"], ["--unheard-of"]),
        (["--max-num", "1"], ["--max-num"]),
    ],
)
def test_a_wrong_flag_is_named_with_value_and_limit(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    assert all(word in caught.value.message for word in words), caught.value.message


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"max_num_seqs: 'x' is not a whole number \(from WEIR_MAX_NUM_SEQS\)"
    ) as caught:
        load(environ={"WEIR_MAX_NUM_SEQS": "x"})
    assert caught.value.param == "max_num_seqs"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max_num_seq: 1", ["max_num_seq", "does not exist"]),
        ("max_num_seqs: true", ["max_num_seqs", "True", "whole number"]),
        ("max_num_seqs: null", ["max_num_seqs", "null"]),
        ("- a", ["name: value"]),
        ("a: [", ["not YAML"]),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str, words: list[str]) -> None:
    (tmp_path / "weir.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load("--config", str(tmp_path / "weir.yaml"))
    assert all(word in caught.value.message for word in words), caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml cannot be read"):
        load("--config", str(tmp_path / "gone.yaml"))


def test_a_required_field_names_its_flag_and_variable() -> None:
    with pytest.raises(ConfigError, match="model_dir: required; give --model-dir or WEIR_MODEL_DIR"):
        load_config(Settings, [], prog="test", environ={"WEIR_MODEL_DIR": ""})


def test_validate_is_called() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Pair:
        low: int = setting(1, help="")
        high: int = setting(2, help="")

        def validate(self) -> None:
            if self.low > self.high:
                raise ConfigError(f"low: {self.low} is above high, {self.high}")

    with pytest.raises(ConfigError, match="low: 5 is above high, 2"):
        load_config(Pair, ["--low", "5"], prog="test", environ={})


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    assert describe_config(load("--secret", "hunter2"))["secret"] == MASK
    assert describe_config(load())["secret"] == "None"

    @dataclass(frozen=True, kw_only=True)
    class Vault:
        pin: int = setting(0, help="", secret=True)

    with pytest.raises(ConfigError) as caught:
        load_config(Vault, [], prog="test", environ={"WEIR_PIN": "hunter2"})
    assert "hunter2" not in caught.value.message


def test_a_secret_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    assert load(environ={"WEIR_SECRET_FILE": str(tmp_path / "secret")}).secret == "hunter2"
    with pytest.raises(ConfigError, match="WEIR_SECRET_FILE"):
        load(environ={"WEIR_SECRET_FILE": str(tmp_path / "gone")})


def test_help_names_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(Settings, ["--help"], prog="test", environ={})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--max-num-seqs" in text
    assert "WEIR_SECRET" in text
    assert "default degrade" in text


def test_described_values_are_plain_text() -> None:
    assert describe_config(load("--policy", "refuse"))["policy"] == "refuse"


def test_children_do_not_inherit_our_file() -> None:
    environ = {"WEIR_CONFIG": "x.yaml", "PATH": "/bin", "WEIR_PORT": "1"}
    assert child_environment({"WEIR_PORT": "2"}, environ) == {"PATH": "/bin", "WEIR_PORT": "2"}


def test_a_positional_field_takes_the_words_without_a_flag() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Question:
        text: str | None = setting(None, help="", is_positional=True)
        depth: int = setting(1, help="")

    def ask(*argv: str) -> Question:
        return load_config(Question, argv, prog="test", environ={})

    assert ask() == Question()
    assert ask("what", "is", "it", "--depth", "2") == Question(text="what is it", depth=2)


def test_a_variable_may_have_a_name_of_its_own() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Client:
        model: str | None = setting(None, help="", variable="WEIR_MODEL_NAME")

    environ = {"WEIR_MODEL": "means something else", "WEIR_MODEL_NAME": "a"}
    assert load_config(Client, [], prog="client", environ=environ).model == "a"
    assert load_config(Client, ["--model", "b"], prog="client", environ=environ).model == "b"
