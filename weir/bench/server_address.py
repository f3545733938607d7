"""Where the measured server is, and the few things it is asked before the measurement."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import httpx

from weir.core.errors import ConfigError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0


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
        if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
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
            UnavailableError: nobody answers, or no model has a name.
        """
        response = await self._send("GET", f"{self._address.api}/models")
        if wanted is not None:
            return wanted
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as exc:
            raise UnavailableError(
                f"{self._address.api}/models names no model (HTTP {response.status_code}): {response.text[:200]}; "
                "give --model"
            ) from exc

    async def server_name(self) -> str | None:
        """What the server says of itself."""
        response = await self._send("GET", f"{self._address.root}/version")
        words = [response.headers.get("server", "")]
        if response.status_code == 200:
            words.append(response.text.strip()[:100])
        return " ".join(word for word in words if word) or None

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer of a POST; None for any but a JSON object."""
        response = await self._send("POST", f"{self._address.root}{path}", body)
        if response.status_code != 200:
            return None
        try:
            answer = response.json()
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None

    async def _send(self, method: str, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return await self._client.request(method, url, json=body)
        except httpx.TransportError as exc:
            raise UnavailableError(f"no server answers at {self._address.root}: {exc or type(exc).__name__}") from exc
