"""A stand-in for the Hugging Face hub on loopback: one repository of local files, over the paths its client asks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves `directory` as the repository `repo`.

    Attributes:
        fetched: names of the files whose content was asked for.
    """

    def __init__(self, repo: str, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo = repo
        self.directory = directory
        self.fetched: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub_server(repo: str, directory: Path) -> Iterator[HubServer]:
    """A running `HubServer`."""
    with HubServer(repo, directory) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        resolve = f"/{self.server.repo}/resolve/"
        files = sorted(file for file in self.server.directory.rglob("*") if file.is_file())
        names = {str(file.relative_to(self.server.directory)): file for file in files}
        if path.startswith(f"/api/models/{self.server.repo}/tree/"):
            self._send_json(
                [{"type": "file", "path": n, "size": f.stat().st_size, "oid": "0" * 40} for n, f in names.items()]
            )
        elif path.startswith(f"/api/models/{self.server.repo}"):
            siblings = [{"rfilename": name} for name in names]
            self._send_json({"id": self.server.repo, "sha": _COMMIT, "siblings": siblings})
        elif path.startswith(resolve) and (name := path.removeprefix(resolve).split("/", 1)[1]) in names:
            content = names[name].read_bytes()
            if self.command == "GET":
                self.server.fetched.append(name)
            self._send(200, content, "application/octet-stream", hashlib.sha1(content).hexdigest())
        else:
            self._send(404, b"{}", "application/json", None)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), "application/json", None)

    def _send(self, status: int, content: bytes, content_type: str, etag: str | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", _COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        if etag is not None:
            self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
