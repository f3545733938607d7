"""`weir COMMAND ...`: finds the command and turns what it refuses into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from weir import __version__
from weir.core.errors import WeirError, find_error

USAGE = """\
usage: weir COMMAND [OPTIONS]

  up       serve a model on this machine: prefill, decode and gateway
  chat     talk to a running gateway
  model    pull, list and inspect models
  bench    measure any server that speaks OpenAI's interface

weir COMMAND --help says more; weir --version prints the version.
"""

EXIT_USAGE = 2
EXIT_BROKEN_PIPE = 141


def _up(argv: Sequence[str]) -> int:
    from weir.cli.up import up

    return up(argv)


def _chat(argv: Sequence[str]) -> int:
    from weir.cli.chat import chat

    return chat(argv)


def _model(argv: Sequence[str]) -> int:
    from weir.cli.model import model

    return model(argv)


def _bench(argv: Sequence[str]) -> int:
    from weir.cli.bench import bench

    return bench(argv)


# Each loads its own module, so that `weir --version` costs nothing.
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"up": _up, "chat": _chat, "model": _model, "bench": _bench}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 2 for whatever one line can say."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("--version", "-V"):
        print(f"weir {__version__}")
        return 0
    if name in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        print(f"weir: there is no command {name!r}\n\n{USAGE}", end="", file=sys.stderr)
        return EXIT_USAGE
    try:
        return command(arguments[1:])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone, as in `weir chat ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as exc:
        print(f"weir {name}: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except (WeirError, ExceptionGroup) as exc:
        error = find_error(exc, WeirError)
        if error is None:
            raise
        print(f"weir {name}: {error.message}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
