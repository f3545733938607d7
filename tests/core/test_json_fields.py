"""Laws of reading what a neighbouring version wrote; the values that travel have theirs beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

import pytest

from weir.core.json_fields import value_from_fields

Name = NewType("Name", str)


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Part:
    size: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Whole:
    name: Name
    count: int = 0
    is_on: bool = False
    colour: Colour | None = None
    parts: tuple[Part, ...] = ()
    last: Part = field(default_factory=Part)


def test_every_kind_of_field_is_read() -> None:
    given = {
        "name": "n",
        "count": 2,
        "is_on": True,
        "colour": "red",
        "parts": [{"size": 2}, {}],
        "last": {"size": 0.5},
    }
    expected = Whole(
        name=Name("n"), count=2, is_on=True, colour=Colour.RED, parts=(Part(size=2.0), Part()), last=Part(size=0.5)
    )
    assert value_from_fields(Whole, given) == expected


def test_unknown_fields_are_ignored_and_absent_ones_take_their_defaults() -> None:
    assert value_from_fields(Whole, {"name": "n", "new": 1, "parts": [{"new": 1}]}) == Whole(
        name=Name("n"), parts=(Part(),)
    )


def test_what_the_caller_knows_is_not_read() -> None:
    assert value_from_fields(Whole, {"name": "theirs"}, name="ours") == Whole(name=Name("ours"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "not an object but list"),
        ({}, "name: absent"),
        ({"name": 1}, "name: not str but int"),
        ({"name": None}, "name: not str but NoneType"),
        ({"name": "n", "count": True}, "count: not int but bool"),
        ({"name": "n", "colour": "green"}, "colour: 'green' is not a valid Colour"),
        ({"name": "n", "parts": {}}, "parts: not a list but dict"),
        ({"name": "n", "parts": [{"size": "x"}]}, "parts: size: not float but str"),
        ({"name": "n", "last": 1}, "last: not an object but int"),
    ],
)
def test_what_is_not_of_its_type_is_named(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        value_from_fields(Whole, given)
