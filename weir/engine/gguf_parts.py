"""The files of a GGUF model that `llama-gguf-split` cut into parts."""

from __future__ import annotations

import re
from pathlib import Path

from weir.core.errors import ModelLoadError

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def gguf_parts(path: Path) -> list[Path]:
    """Every part of the model that `path` is the file, or any part, of; in order.

    Raises:
        ModelLoadError: a part is missing; names it.
    """
    match = _PART.search(path.name)
    if match is None:
        return [path]
    count = int(match[2])
    parts = [
        path.with_name(f"{path.name[: match.start()]}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)
    ]
    for part in parts:
        if not part.is_file():
            raise ModelLoadError(f"{part}: missing; the model has {count} parts")
    return parts
