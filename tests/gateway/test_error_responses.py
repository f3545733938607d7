import json

import pytest

from gateway.error_responses import STATUS_OF_ERROR, error_object, error_response, status_of
from weir.core import errors
from weir.core.errors import all_error_classes


def test_every_class_of_the_tree_has_its_own_row():
    assert set(STATUS_OF_ERROR) == set(all_error_classes())


@pytest.mark.parametrize("error_class", all_error_classes())
def test_every_error_becomes_json_in_the_shape_of_openai(error_class):
    error = error_class("what went wrong", param="n", hop="decode")
    response = error_response(error)
    assert response.status_code == status_of(error)
    assert response.headers["content-type"] == "application/json"
    body = json.loads(bytes(response.body))["error"]
    assert body["message"] == "what went wrong"
    assert body["param"] == "n"
    assert body["code"] == error.code
    assert body["hop"] == "decode"
    assert body["type"] in {
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error",
    }  # fmt: skip


def test_the_callers_faults_are_4xx_and_ours_5xx():
    for error_class in all_error_classes():
        is_callers = issubclass(
            error_class,
            errors.InvalidRequestError
            | errors.AuthenticationError
            | errors.NotFoundError
            | errors.ConflictError
            | errors.PayloadTooLargeError
            | errors.OverloadedError
            | errors.RequestCancelledError,
        )
        assert (status_of(error_class("x")) < 500) is is_callers


@pytest.mark.parametrize(("given_s", "header"), [(None, None), (0.0, "1"), (0.2, "1"), (1.2, "2"), (7.0, "7")])
def test_retry_after_is_whole_seconds_and_never_zero(given_s, header):
    response = error_response(errors.OverloadedError("full", retry_after_s=given_s))
    assert response.status_code == 429
    assert response.headers.get("retry-after") == header


def test_an_error_without_a_hop_does_not_name_one():
    assert error_object(errors.InvalidRequestError("x")) == {
        "error": {"message": "x", "type": "invalid_request_error", "param": None, "code": "invalid_request"}
    }


def test_odd_values_in_a_message_are_still_json():
    error = errors.InvalidRequestError("temperature: must be a finite number, got nan \ud800 \x00")
    assert json.loads(bytes(error_response(error).body))["error"]["message"] == error.message
