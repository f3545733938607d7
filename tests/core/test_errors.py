from __future__ import annotations

import json

import pytest

from weir.core import errors
from weir.core.errors import WeirError, all_error_classes, error_from_dict, find_error


def test_every_class_of_the_module_is_in_the_tree() -> None:
    written = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert written == set(all_error_classes())


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        name = line.lstrip(" │├└─").split(" ")[0]
        if name.endswith("Error"):
            drawn.append((line.index(name) // 4, name))
    depth = {cls.__name__: len(cls.__mro__) - WeirError.__mro__.index(WeirError) for cls in all_error_classes()}
    base = depth["WeirError"]
    first = drawn[0][0]
    assert {name: level - first for level, name in drawn} == {name: value - base for name, value in depth.items()}


def test_codes_name_one_class_each() -> None:
    codes = [cls.code for cls in all_error_classes()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("cls", all_error_classes())
def test_an_error_survives_json_with_its_class(cls: type[WeirError]) -> None:
    error = cls("größer als 5", param="n", hop="decode", retry_after_s=0.5)
    rebuilt = error_from_dict(json.loads(json.dumps(error.to_dict())))
    assert type(rebuilt) is cls
    assert vars(rebuilt) == vars(error)


def test_a_class_of_a_later_version_becomes_the_root() -> None:
    rebuilt = error_from_dict({"error": "FutureError", "message": "later"})
    assert (type(rebuilt), rebuilt.message) == (WeirError, "later")


def test_fields_that_are_not_set_are_not_sent() -> None:
    assert errors.NoWorkerError("none").to_dict() == {"error": "NoWorkerError", "message": "none"}


def test_an_error_is_found_in_nested_groups() -> None:
    wanted = errors.ConfigError("here")
    group = ExceptionGroup("a", [ValueError(), ExceptionGroup("b", [KeyError(), wanted])])
    assert find_error(group, errors.ConfigError) is wanted
    assert find_error(group, errors.ModelLoadError) is None
    assert find_error(wanted, WeirError) is wanted
