"""One frozen dataclass per process, filled from flags, environment and one YAML file.

This is the only reader of `os.environ`. Order of precedence for a field `max_num_seqs`: the flag `--max-num-seqs`, the
variable `WEIR_MAX_NUM_SEQS`, the key `max_num_seqs` of the file that `--config` or `WEIR_CONFIG` names, the default.
Every value is checked here, so that a process refuses a bad setting before it loads anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import os
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from weir.core.errors import ConfigError

T = TypeVar("T")

ENV_PREFIX = "WEIR_"
MASK = "********"

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_BYTE_UNITS = {
    "": 1,
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}
_LONGEST_S = 366 * 86400
_MOST_BYTES = 2**50


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] | None = None,
    secret: bool = False,
    is_positional: bool = False,
    variable: str | None = None,
) -> Any:
    """A field of a configuration dataclass; without a default it must be given.

    Args:
        minimum, maximum: limits of a number, both allowed values themselves.
        secret: never logged nor named in a message; the variable `WEIR_X_FILE` may name a file that holds it.
        is_positional: given by words that follow no flag, joined by blanks.
        variable: the variable's name, where that made of the field's means something else to another command.
    """
    metadata = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "secret": secret,
        "is_positional": is_positional,
        "variable": variable,
    }
    return dataclasses.field(default=default, metadata=metadata, kw_only=True)


def load_config(
    cls: type[T],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Build `cls` from flags (default: this process' own), environment and file, then call its `validate()` if any.

    Fields may be str, int, float, bool, Path, an Enum, tuple[str, ...], or one of these or None. A tuple is written
    with commas, None as `none`; an int field whose name ends in `_bytes` takes units (`512MiB`). What is in
    seconds (`_s`) is at most a year, what is in bytes at most 2^50, if nothing else is said. An empty variable
    counts as not set.

    Raises:
        ConfigError: names the field, the value, the limit and where the value came from.
        SystemExit: `--help` was asked for.
    """
    environ = os.environ if environ is None else environ
    fields = _fields_of(cls)
    flags = _parse_flags(fields, argv, prog=prog, description=inspect.getdoc(cls) or "")
    config_path = flags.pop("config", None) or environ.get(f"{ENV_PREFIX}CONFIG") or None
    from_file = _read_file(Path(config_path), fields) if config_path else {}
    values: dict[str, Any] = {}
    for field in fields.values():
        raw, source = _find(field, flags, environ, from_file, config_path)
        if raw is not None:
            values[field.name] = field.convert(raw, source)
        elif field.is_required:
            raise ConfigError(f"{field.name}: required; give {field.flag} or {field.variable}", param=field.name)
    config = cls(**values)
    validate = getattr(config, "validate", None)
    if validate is not None:
        validate()
    return config


def describe_config(config: Any) -> dict[str, str]:
    """Every field as text, for the log; secrets are masked."""
    described: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("secret") and value:
            described[field.name] = MASK
        else:
            described[field.name] = str(value.value) if isinstance(value, Enum) else str(value)
    return described


def child_environment(overrides: Mapping[str, str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a process started by this one: ours without `WEIR_CONFIG`, which names our own file."""
    inherited = dict(os.environ if environ is None else environ)
    inherited.pop(f"{ENV_PREFIX}CONFIG", None)
    return {**inherited, **overrides}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """One setting, with what is needed to read it from any source."""

    name: str
    type: Any
    is_optional: bool
    is_required: bool
    default: Any
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[Any, ...] | None
    is_secret: bool
    is_positional: bool
    variable: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def convert(self, raw: object, source: str) -> Any:
        """A checked value of the field's type. Raises ConfigError."""
        if raw is _NONE or (isinstance(raw, str) and raw.strip().lower() == "none"):
            if self.type is tuple:
                return ()
            if self.is_optional:
                return None
        try:
            value = self._parse(raw)
        except ValueError as exc:
            raise self._error(raw, f"is not {exc}", source) from exc
        if self.choices is not None and value not in self.choices:
            allowed = ", ".join(str(choice) for choice in self.choices)
            raise self._error(raw, f"is not one of {allowed}", source)
        if self.minimum is not None and value < self.minimum:
            raise self._error(raw, f"is below the minimum of {_plain(self.minimum)}", source)
        if self.maximum is not None and value > self.maximum:
            raise self._error(raw, f"is above the maximum of {_plain(self.maximum)}", source)
        return value

    def _parse(self, raw: object) -> Any:
        """Raises ValueError whose text ends the sentence "x is not ..."."""
        text = raw.strip() if isinstance(raw, str) else None
        if self.type is bool:
            return _parse_bool(raw, text)
        if self.type is int:
            return _parse_int(raw, text, has_units=self.name.endswith("_bytes"))
        if self.type is float:
            return _parse_float(raw, text)
        if self.type is tuple:
            return _parse_tuple(raw, text)
        if isinstance(self.type, type) and issubclass(self.type, Enum):
            return _parse_enum(self.type, raw)
        if not isinstance(raw, (str, int, float)) or isinstance(raw, bool):
            raise ValueError("a text")
        return Path(str(raw)).expanduser() if self.type is Path else str(raw)

    def _error(self, raw: object, problem: str, source: str) -> ConfigError:
        shown = MASK if self.is_secret else repr(raw) if raw is not _NONE else "null"
        return ConfigError(f"{self.name}: {shown} {problem} (from {source})", param=self.name)


class _Null:
    """A null in the file; None itself means "not given"."""


_NONE = _Null()


def _fields_of(cls: type[Any]) -> dict[str, _Field]:
    hints = get_type_hints(cls)
    found: dict[str, _Field] = {}
    for field in dataclasses.fields(cls):
        kind, is_optional = _unwrap(hints[field.name])
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        choices = field.metadata.get("choices")
        found[field.name] = _Field(
            name=field.name,
            type=kind,
            is_optional=is_optional,
            is_required=is_required,
            default=None if is_required else field.default,
            help=field.metadata.get("help", ""),
            minimum=field.metadata.get("minimum"),
            maximum=_maximum_of(field),
            choices=tuple(choices) if choices is not None else None,
            is_secret=bool(field.metadata.get("secret")),
            is_positional=bool(field.metadata.get("is_positional")),
            variable=field.metadata.get("variable") or ENV_PREFIX + field.name.upper(),
        )
    return found


def _maximum_of(field: dataclasses.Field[Any]) -> float | None:
    """Its own, or what nothing in seconds or bytes needs and every clock and system call takes."""
    by_unit = _LONGEST_S if field.name.endswith("_s") else _MOST_BYTES if field.name.endswith("_bytes") else None
    maximum: float | None = field.metadata.get("maximum")
    return by_unit if maximum is None else maximum


def _plain(limit: float) -> str:
    """Without an exponent, and without a fraction of nothing."""
    return str(int(limit)) if limit == int(limit) else str(limit)


def _unwrap(hint: Any) -> tuple[Any, bool]:
    """The plain type of a hint, and whether None is allowed beside it."""
    if get_origin(hint) in (Union, types.UnionType):
        plain = [part for part in get_args(hint) if part is not type(None)]
        assert len(plain) == 1, f"{hint}: a setting has one type, or one type and None"
        return _unwrap(plain[0])[0], True
    return get_origin(hint) or hint, False


def _find(
    field: _Field,
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    from_file: Mapping[str, object],
    config_path: str | None,
) -> tuple[object, str]:
    """The value as given, None if nowhere, and the name of its source."""
    if field.name in flags:
        if not flags[field.name] and not field.is_positional:  # as by --api-keys "$FORGOTTEN"
            raise ConfigError(f"{field.name}: {field.flag} is empty; nothing is written `none`", param=field.name)
        return flags[field.name], field.flag
    if environ.get(field.variable):
        return environ[field.variable], field.variable
    file_variable = f"{field.variable}_FILE"
    if field.is_secret and environ.get(file_variable):
        try:
            text = Path(environ[file_variable]).read_text().strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{field.name}: {file_variable} names a file that cannot be read: {exc}") from exc
        if not text:
            raise ConfigError(f"{field.name}: the file that {file_variable} names is empty", param=field.name)
        return text, file_variable
    if field.name in from_file:
        raw = from_file[field.name]
        return (_NONE if raw is None else raw), f"the configuration file {config_path}"
    return None, ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help. What other processes take is set by WEIR_ variables")


def _parse_flags(
    fields: Mapping[str, _Field], argv: Sequence[str] | None, *, prog: str, description: str
) -> dict[str, str]:
    """Raw text of the flags that were given, by field name; what came in pieces is joined."""
    parser = _Parser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings by name [WEIR_CONFIG]")
    for field in fields.values():
        text = _help_text(field)
        if field.is_positional:
            parser.add_argument(field.name, nargs="*", metavar=field.name.upper(), help=text)
        elif field.type is bool:
            parser.add_argument(field.flag, dest=field.name, nargs="?", const="true", metavar="BOOL", help=text)
            off = "--no-" + field.name.replace("_", "-")
            parser.add_argument(off, dest=field.name, action="store_const", const="false", help=argparse.SUPPRESS)
        elif field.type is tuple:
            parser.add_argument(field.flag, dest=field.name, action="extend", nargs="+", metavar="A,B", help=text)
        else:
            metavar = getattr(field.type, "__name__", "value").upper()
            parser.add_argument(field.flag, dest=field.name, metavar=metavar, help=text)
    given = vars(parser.parse_args(argv))
    joined: dict[str, str] = {}
    for name, value in given.items():
        if isinstance(value, list):
            value = (" " if fields[name].is_positional else ",").join(value)
        joined[name] = value
    return joined


def _help_text(field: _Field) -> str:
    parts = [field.help]
    if field.choices is not None:
        parts.append("one of " + ", ".join(str(choice) for choice in field.choices))
    if not field.is_required and not field.is_secret:
        default = field.default.value if isinstance(field.default, Enum) else field.default
        if isinstance(default, tuple):
            default = ",".join(default) or None
        parts.append(f"default {default}")
    return ("; ".join(part for part in parts if part) + f" [{field.variable}]").replace("%", "%%")


def _read_file(path: Path, fields: Mapping[str, _Field]) -> dict[str, object]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as exc:
        raise ConfigError(f"config: {path} cannot be read: {exc.strerror}", param="config") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"config: {path} is not YAML: {' '.join(str(exc).split())}", param="config") from exc
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config: {path} must hold `name: value` lines", param="config")
    named = {str(name).replace("-", "_"): value for name, value in content.items()}
    unknown = sorted(named.keys() - fields.keys())
    if unknown:
        raise ConfigError(
            f"config: {path} sets {', '.join(unknown)}, which does not exist here; what another process takes is "
            f"set in its own file, or by a variable such as {ENV_PREFIX}{unknown[0].upper()}",
            param=unknown[0],
        )
    return named


def _parse_bool(raw: object, text: str | None) -> bool:
    if isinstance(raw, bool):
        return raw
    if text is not None and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError("true or false")


def _parse_int(raw: object, text: str | None, *, has_units: bool) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if text is not None:
        if has_units:
            match = re.fullmatch(r"(-?[0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([a-z]*)", text.lower())
            if match is not None and match[2] in _BYTE_UNITS:
                return int(Fraction(match[1]) * _BYTE_UNITS[match[2]])
            raise ValueError("a whole number of bytes, such as 1048576 or 512MiB; units are KiB to TiB and kB to TB")
        if re.fullmatch(r"[+-]?[0-9]{1,40}", text):
            return int(text)
    raise ValueError("a whole number")


def _parse_float(raw: object, text: str | None) -> float:
    try:
        value = float(text) if text is not None else raw
    except ValueError:
        raise ValueError("a number") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("a finite number")
    return float(value)


def _parse_tuple(raw: object, text: str | None) -> tuple[str, ...]:
    if text is not None:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if isinstance(raw, (list, tuple)):
        return tuple(str(part) for part in raw)
    raise ValueError("a list")


def _parse_enum(cls: type[Enum], raw: object) -> Enum:
    for member in cls:
        if raw == member.value or raw is member:
            return member
    raise ValueError("one of " + ", ".join(str(member.value) for member in cls))
