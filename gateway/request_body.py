"""From the bytes of a request to a checked model, or to an error that names the field, the value and the limit.

JSON is read strictly: UTF-8 without a mark, no key twice, no NaN and no infinity however it is spelled, no half
surrogate pairs. What passes can be written back as JSON, into an answer or a message to a worker.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request

from gateway.http_settings import HttpSettings
from weir.core.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedFeatureError

Model = TypeVar("Model", bound=BaseModel)

_UTF8_MARK = b"\xef\xbb\xbf"
_VALUE_CHARS = 60

MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Of a body that is too long; a client that sends more is cut off."""

_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
"""Our words for pydantic's kinds of fault, where its own are clumsy."""


async def read_request(request: Request, model: type[Model], settings: HttpSettings) -> Model:
    """Read the body and check it against `model`; raises as `read_fields` and `check_fields`."""
    return check_fields(await read_fields(request, settings), model)


async def read_fields(request: Request, settings: HttpSettings) -> dict[str, Any]:
    """Read the body: one JSON object.

    Raises:
        InvalidRequestError: not strict JSON, or no object.
        PayloadTooLargeError: more bytes than `max_body_bytes`.
        HTTPException: 415, the content type is not JSON.
        ClientDisconnect: the client left before it had sent all.
    """
    _check_content_type(request)
    fields = decode_json(await _read_body(request, settings))
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"body: must be a JSON object, got {_kind(fields)}", param="body")
    return fields


def check_fields(fields: Mapping[str, Any], model: type[Model]) -> Model:
    """Check decoded JSON against `model`; the first fault is told.

    Raises:
        InvalidRequestError: a field is missing or wrong.
        UnsupportedFeatureError: a field or value that is refused by name, or that nobody knows.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as exc:
        raise _translate(exc.errors(include_url=False)[0]) from exc


def decode_json(raw: bytes) -> Any:
    """Strict JSON.

    Raises:
        InvalidRequestError: says what is wrong and where.
    """
    if not raw:
        raise InvalidRequestError("body: is empty, a JSON object is needed", param="body")
    if raw.startswith(_UTF8_MARK):
        raise InvalidRequestError("body: starts with a byte order mark, which JSON does not allow", param="body")
    reader = _StrictReader()
    try:
        value = json.loads(
            raw.decode(),
            object_pairs_hook=reader.object,
            parse_float=reader.float,
            parse_constant=reader.constant,
        )
    except UnicodeDecodeError as exc:
        raise InvalidRequestError(f"body: not UTF-8 at byte {exc.start}", param="body") from exc
    except json.JSONDecodeError as exc:
        raise InvalidRequestError(f"body: not JSON: {exc.msg} at character {exc.pos}", param="body") from exc
    except RecursionError as exc:
        raise InvalidRequestError("body: JSON nested too deeply", param="body") from exc
    except ValueError as exc:
        raise InvalidRequestError("body: a number has too many digits", param="body") from exc
    if reader.saw_not_finite or b"\\ud" in raw or b"\\uD" in raw:
        _refuse_unwritable(value, "")
    return value


class _StrictReader:
    """Hooks of `json.loads`."""

    def __init__(self) -> None:
        self.saw_not_finite = False

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            seen: set[str] = set()
            name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise InvalidRequestError(f"{_shown(name)}: is given twice", param=name)
        return fields

    def float(self, text: str) -> float:
        value = float(text)
        if math.isinf(value):
            self.saw_not_finite = True
        return value

    def constant(self, name: str) -> Any:
        self.saw_not_finite = True
        return float(name)


def _refuse_unwritable(value: Any, path: str) -> None:
    """Raises for the first value under `path` that is no JSON; the recursion is as deep as the reader allowed."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequestError(f"{path}: must be a finite number, got {value}", param=path)
    if isinstance(value, str) and not _is_writable(value):
        raise InvalidRequestError(f"{path}: holds half a surrogate pair", param=path)
    if isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_unwritable(item, f"{path}[{index}]")
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_unwritable(name, path or "body")
            _refuse_unwritable(item, f"{path}.{name}" if path else name)


def _is_writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_content_type(request: Request) -> None:
    header = request.headers.get("content-type")
    if header is None:
        return
    kind = header.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPException(415, f"content-type: must be application/json, got {_shown(kind)}")


async def _read_body(request: Request, settings: HttpSettings) -> bytes:
    """The whole body. One that is too long is read on, and thrown away: a client that still sends does not listen."""
    limit = settings.max_body_bytes
    too_long = PayloadTooLargeError(f"body: over {limit} bytes, which is the limit", param="body")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit and "expect" in request.headers:
        raise too_long
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s), aclosing(request.stream()) as stream:
            async for chunk in stream:
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                elif size > limit + MAX_DISCARDED_BYTES:
                    break
    except TimeoutError as exc:
        raise HTTPException(408, f"body: did not arrive within {settings.body_timeout_s:g} s") from exc
    if size > limit:
        raise too_long
    return b"".join(chunks)


def _translate(fault: ErrorDetails) -> InvalidRequestError:
    """One fault that pydantic found, in our words."""
    path = _path(fault["loc"])
    kind = fault["type"]
    if kind in ("invalid_request", "unsupported_feature"):
        param = _join(path, (fault.get("ctx") or {})["at"]) or "body"
        error = UnsupportedFeatureError if kind == "unsupported_feature" else InvalidRequestError
        return error(f"{param}: {fault['msg']}", param=param)
    param = path or "body"
    if kind == "extra_forbidden":
        return UnsupportedFeatureError(f"{param}: no such field", param=param)
    if kind == "missing":
        return InvalidRequestError(f"{param}: is required", param=param)
    if kind == "too_short":
        return InvalidRequestError(f"{param}: must not be an empty list", param=param)
    words = fault["msg"].removeprefix("Input should be ").replace("String should have", "a string of")
    wanted = _WANTED.get(kind) or words
    return InvalidRequestError(f"{param}: must be {wanted}, got {_shown(fault['input'])}", param=param)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for part in location:
        path = _join(path, f"[{part}]" if isinstance(part, int) else part)
    return path


def _join(path: str, part: str) -> str:
    return f"{path}.{part}" if path and part and not part.startswith("[") else path + part


def _shown(value: Any) -> str:
    """A value as an error message may show it: short."""
    if isinstance(value, list | dict):
        return _kind(value)
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= _VALUE_CHARS else text[:_VALUE_CHARS] + "..."


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
