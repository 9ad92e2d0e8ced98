"""The command line: kvd serve | status | verify | gateway | demo | replay | version."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import kvd

EXIT_FAILED = 1
EXIT_MISUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["demo"]:  # its flags are the demo's own
        return demo(words[1:])
    parser = argparse.ArgumentParser(
        prog="kvd",
        description="A daemon that keeps the KV cache of LLM engines in host memory",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvd {kvd.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = partial(commands.add_parser, allow_abbrev=False)
    # Each command's flags are declared only when it is called: starting stays quick.
    command = words[0] if words and not words[0].startswith("-") else ""
    _declare_serve(add("serve", help="run the daemon"), command)
    _declare_status(
        add("status", help="show what a running daemon does and holds"),
        command,
    )
    _declare_gateway(
        add("gateway", help="let operators on other machines in, by mutual TLS"),
        command,
    )
    _declare_verify(
        add("verify", help="look for broken invariants in a running daemon"),
        command,
    )
    add("demo", help="show a cache that outlives its engine and its daemon, with a real model")
    _declare_replay(
        add("replay", help="tell how much of a trace an eviction policy would find"),
        command,
    )
    add("version", help="print the version")
    arguments = parser.parse_args(words)
    match arguments.command:
        case "serve":
            return serve(arguments)
        case "status":
            return status(arguments)
        case "gateway":
            return gateway(arguments)
        case "verify":
            return verify(arguments)
        case "replay":
            return replay(arguments)
        case _:
            print(f"kvd {kvd.__version__}")
            return 0


def _declare_serve(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "serve":
        from kvd import config

        config.add_arguments(parser)


def _declare_status(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "status":
        from kvd.cli import status

        status.add_arguments(parser)


def _declare_gateway(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "gateway":
        from kvd.cli import gateway

        gateway.add_arguments(parser)


def _declare_verify(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "verify":
        from kvd.cli import verify

        verify.add_arguments(parser)


def _declare_replay(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "replay":
        from kvd.cli import replay

        replay.add_arguments(parser)


def serve(arguments: argparse.Namespace) -> int:
    """Run the daemon, or print its settings."""
    from kvd import config

    try:
        settings = config.load(arguments, os.environ)
    except config.ConfigError as error:
        print(f"kvd: {error}", file=sys.stderr)
        return EXIT_MISUSED
    if arguments.print_config:
        print(config.as_toml(settings), end="")
        return 0
    from kvd.cli import serve as command

    return command.serve(settings, lambda: config.load(arguments, os.environ))


def status(arguments: argparse.Namespace) -> int:
    """Show a running daemon's state."""
    from kvd.cli import status

    return status.run(arguments, os.environ)


def gateway(arguments: argparse.Namespace) -> int:
    """Let operators on other machines in."""
    from kvd.cli import gateway

    return gateway.run(arguments, os.environ)


def verify(arguments: argparse.Namespace) -> int:
    """Look for broken invariants in a running daemon."""
    from kvd.cli import verify

    return verify.run(arguments, os.environ)


def replay(arguments: argparse.Namespace) -> int:
    """Replay a trace."""
    from kvd.cli import replay

    return replay.run(arguments)


def demo(flags: Sequence[str]) -> int:
    """Run examples/engine's demonstration with its own flags."""
    root = Path(kvd.__file__).resolve().parents[1]
    if (root / "examples" / "engine" / "demo.py").exists():
        _become_demo(root, flags)
    print(
        "kvd: the demo is not part of the installed package; it lies in examples/ of the"
        " source tree: get that and run `make demo`",
        file=sys.stderr,
    )
    return EXIT_FAILED


def _become_demo(root: Path, flags: Sequence[str]) -> NoReturn:
    """Run the demo in our place: Ctrl-C and SIGTERM reach it, and it ends its daemon in order."""
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "examples.engine.demo", *flags]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})  # noqa: S606 - no shell


if __name__ == "__main__":
    sys.exit(main())
