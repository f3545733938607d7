"""The keys that open this gateway, compared without a hint of how much of a wrong one was right."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

_SCHEME = b"bearer"


class ApiKeys:
    """Any of `keys` opens; with none, everybody may come in and has the empty key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = {sha256(key.encode()).digest(): key for key in keys}

    def find(self, authorizations: Sequence[bytes]) -> str | None:
        """The key that a call came with, by the values of its Authorization headers; None where it must stay out."""
        if not self._digests:
            return ""
        if len(authorizations) != 1:
            return None
        scheme, _, given = authorizations[0].strip().partition(b" ")
        if scheme.lower() != _SCHEME:
            return None
        digest = sha256(given.strip()).digest()
        found: str | None = None
        for known, key in self._digests.items():
            if hmac.compare_digest(known, digest):
                found = key
        return found
