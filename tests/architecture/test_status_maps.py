from __future__ import annotations

from gateway.error_responses import STATUS_OF_ERROR
from weir.core.errors import InvalidRequestError, WeirError, all_error_classes
from weir.runtime.grpc_status import STATUS_BY_CLASS


def test_every_error_has_an_http_status() -> None:
    assert set(STATUS_OF_ERROR) == set(all_error_classes())


def test_every_error_has_a_grpc_status() -> None:
    assert set(STATUS_BY_CLASS) == set(all_error_classes())


def test_only_the_callers_faults_are_4xx_and_only_ours_are_5xx() -> None:
    """A subclass of InvalidRequestError is always 4xx; no error is a success."""
    assert all(status >= 400 for status in STATUS_OF_ERROR.values())
    assert all(STATUS_OF_ERROR[cls] < 500 for cls in all_error_classes() if issubclass(cls, InvalidRequestError))
    assert STATUS_OF_ERROR[WeirError] == 500
