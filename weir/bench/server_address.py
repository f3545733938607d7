"""Where the measured server is, and the few things it is asked before the measurement."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import httpx

from weir.core.errors import ConfigError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
MAX_REFUSAL_BYTES = 300
REFUSED_KEY = (401, 403)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """An OpenAI-compatible server.

    Attributes:
        root: without a path of the API, such as http://127.0.0.1:8000.
        api: where `/models` and `/completions` are, such as http://127.0.0.1:8000/v1.
    """

    root: str
    api: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, base_url: str, api_key: str | None = None) -> ServerAddress:
        """`base_url` may or may not end in the version, `/v1`. Raises ConfigError for a URL or a key that is none."""
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key: only printable ASCII fits into a header", param="api_key")
        try:
            url = httpx.URL(base_url)
        except httpx.InvalidURL as exc:
            raise ConfigError(f"base_url: {base_url!r} is no URL: {exc}", param="base_url") from exc
        is_port = url.port is None or 1 <= url.port <= 65535
        has_more = url.userinfo or url.query or url.fragment
        if url.scheme not in ("http", "https") or not url.host or not is_port or has_more:
            raise ConfigError(f"base_url: {base_url!r} is not http://host:port", param="base_url")
        given = str(url).rstrip("/")
        root = re.sub(r"/v\d+$", "", given)
        return cls(root=root, api=given if root != given else f"{root}/v1", api_key=api_key)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class ServerQuestions:
    """Short questions to the server, outside of what is measured; an async context manager."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.AsyncClient(headers=address.headers, timeout=timeout, trust_env=False)

    async def __aenter__(self) -> ServerQuestions:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    async def find_model(self, wanted: str | None) -> str:
        """`wanted`, or the first model of the server.

        Raises:
            UnavailableError: nobody answers, the key is refused, or no model has a name.
        """
        response = await self._send("GET", f"{self._address.api}/models")
        if response.status_code in REFUSED_KEY:
            said = refusal_of(response.content)
            raise UnavailableError(f"api_key: the server says: {said} (HTTP {response.status_code})")
        if wanted is not None:
            return wanted
        try:
            return str(_field_of(response, "data")[0]["id"])
        except (LookupError, TypeError) as exc:
            said = refusal_of(response.content)
            raise UnavailableError(
                f"/models of the server names no model: {said} (HTTP {response.status_code}); give --model"
            ) from exc

    async def server_name(self) -> str | None:
        """What the server says of itself, if anything."""
        response = await self._send("GET", f"{self._address.root}/version")
        said = {"server": response.headers.get("server"), "version": _field_of(response, "version")}
        return ", ".join(f"{name} {word}" for name, word in said.items() if word) or None

    async def ask(self, path: str, body: dict[str, Any], field: str) -> Any:
        """One field of the answer to a POST.

        Raises:
            UnavailableError: the server's own words, or that there is no such field.
        """
        response = await self._send("POST", f"{self._address.root}{path}", body)
        value = _field_of(response, field)
        if response.status_code != 200 or value is None:
            said = refusal_of(response.content)
            raise UnavailableError(f"{path} of the server: {said} (HTTP {response.status_code})")
        return value

    async def _send(self, method: str, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return await self._client.request(method, url, json=body)
        except httpx.RequestError as exc:
            raise UnavailableError(f"no server answers at {self._address.root}: {exc or type(exc).__name__}") from exc


def refusal_of(body: bytes) -> str:
    """The message of an error as OpenAI words it, or the start of whatever it is."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body[:MAX_REFUSAL_BYTES].decode(errors="replace").strip() or "no reason given"


def _field_of(response: httpx.Response, name: str) -> Any:
    """A field of a JSON object; None where there is none."""
    try:
        return response.json()[name]
    except (ValueError, LookupError, TypeError):
        return None
