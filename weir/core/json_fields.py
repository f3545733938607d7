"""Values of this version from the JSON that a neighbouring version wrote.

Fields this version does not know are ignored at every depth, and absent ones take their defaults: that is what lets
two versions work together. What is there must be of its type.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]


def value_from_fields(cls: Callable[..., T], given: object, **known: object) -> T:
    """A dataclass of strings, numbers, enums (by value), other such dataclasses, tuples of them, and None.

    Args:
        given: what `json.loads` made of the other version's value.
        known: fields that do not come from there.

    Raises:
        ValueError: a field without a default is absent, or a value is not of its field's type; names the field.
    """
    if not isinstance(given, dict):
        raise ValueError(f"not an object but {type(given).__name__}")
    values = dict(known)
    for name, read, is_required in _readers(cls):
        if name in given and name not in known:
            try:
                values[name] = read(given[name])
            except ValueError as exc:
                raise ValueError(f"{name}: {exc}") from exc
        elif is_required and name not in known:
            raise ValueError(f"{name}: absent")
    return cls(**values)


@cache
def _readers(cls: Hashable) -> tuple[tuple[str, Reader, bool], ...]:
    """Name, reader, and whether it must be there, of each field."""
    assert isinstance(cls, type)
    assert is_dataclass(cls)
    annotations = get_type_hints(cls)
    return tuple(
        (field.name, _reader(annotations[field.name]), field.default is MISSING and field.default_factory is MISSING)
        for field in fields(cls)
    )


def _reader(annotation: Any) -> Reader:
    if isinstance(annotation, NewType):
        return _reader(annotation.__supertype__)
    origin, kinds = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        assert kinds[1:] == (NoneType,), annotation
        read = _reader(kinds[0])
        return lambda given: None if given is None else read(given)
    if origin is tuple:
        assert kinds[1:] == (Ellipsis,), annotation
        return _tuple_reader(_reader(kinds[0]))
    assert isinstance(annotation, type)
    if is_dataclass(annotation):
        return lambda given: value_from_fields(annotation, given)
    return annotation if issubclass(annotation, Enum) else _plain_reader(annotation)


def _tuple_reader(read_item: Reader) -> Reader:
    def read(given: Any) -> Any:
        if not isinstance(given, list):
            raise ValueError(f"not a list but {type(given).__name__}")
        return tuple(map(read_item, given))

    return read


def _plain_reader(kind: type) -> Reader:
    def read(given: Any) -> Any:
        if type(given) is kind:
            return given
        if kind is float and type(given) is int:
            return float(given)
        raise ValueError(f"not {kind.__name__} but {type(given).__name__}")

    return read
