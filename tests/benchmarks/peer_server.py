"""A peer as `benchmarks.peers` meets it: `python tests/benchmarks/peer_server.py PORT [silent]`, killed when done with.

Answers completions of any prompt with as many pieces of text as tokens were asked for; a silent one answers none.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class PeerHandler(BaseHTTPRequestHandler):
    """`/health`, `/v1/models` and `/v1/completions`."""

    is_silent = False

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "peer"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions" or self.is_silent:
            self._answer(503, {"error": {"message": "not today"}})
            return
        self.send_response(200)
        self.end_headers()
        for _ in range(request["max_tokens"]):
            self._send({"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    PeerHandler.is_silent = sys.argv[2:] == ["silent"]
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), PeerHandler).serve_forever()
