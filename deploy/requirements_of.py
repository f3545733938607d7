"""Prints the third-party requirements of one of Weir's extras, a line each, so that an image can cache them as a layer.

Usage: requirements_of.py EXTRA [--without NAME]
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path


def requirements_of(extra: str, project: dict[str, object], without: str | None) -> list[str]:
    """The base requirements of `project` and those of `extra`, references to the project's own extras left out."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    base = project["dependencies"]
    assert isinstance(base, list)
    names = [*base, *extras[extra]]
    return [name for name in names if re.split(r"[<>=\[; ]", name)[0] not in (project["name"], without)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extra")
    parser.add_argument("--without")
    args = parser.parse_args()
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    sys.stdout.write("\n".join(requirements_of(args.extra, project, args.without)) + "\n")


if __name__ == "__main__":
    main()
