"""The table of commands. Each is imported when it is called: `kvd --help` stays quick."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

import kvd
from kvd.cli.exits import NobodyReads
from kvd.cli.interrupts import ends_at_once

# Name, what it does in a line, and where its `command` is; in the order of `kvd --help`.
COMMANDS = (
    ("serve", "Run the daemon.", "kvd.cli.serving"),
    ("status", "Show what a running daemon does and holds; --watch: live.", "kvd.cli.status"),
    ("doctor", "Find what is wrong with this machine or the daemon.", "kvd.cli.doctor.command"),
    ("namespaces", "List the namespaces, and why they differ.", "kvd.cli.namespaces"),
    ("events", "Show what is stored and removed.", "kvd.cli.events"),
    ("explain", "Tell why a request missed.", "kvd.cli.explain"),
    ("record", "Record a trace of what engines ask for.", "kvd.cli.record"),
    ("size", "Tell how large a pool should be.", "kvd.cli.size"),
    ("quota", "Show or set tenants' quotas.", "kvd.cli.quota"),
    ("clear", "Forget blocks.", "kvd.cli.clear"),
    ("drain", "Accept no more work, and wait for what is under way.", "kvd.cli.drain"),
    ("undrain", "End a drain: accept work again.", "kvd.cli.undrain"),
    ("verify", "Look for broken invariants in a running daemon.", "kvd.cli.verify"),
    ("gateway", "Let operators on other machines in, by mutual TLS.", "kvd.cli.gateway"),
    ("replay", "Tell how much of a trace a policy would find.", "kvd.cli.replay.command"),
    ("demo", "Show a cache that outlives its engine, with a real model.", "kvd.cli.demo"),
    ("completion", "Print a shell's script that completes kvd's words.", "kvd.cli.completion"),
    ("version", "Print the version.", "kvd.cli.version"),
)


class Commands(click.Group):
    """Finds commands by COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        """Their names."""
        return [name for name, _, _ in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """One of them, imported; None: there is none of this name."""
        for name, _, module in COMMANDS:
            if name == cmd_name:
                with ends_at_once():
                    found: click.Command = import_module(module).command
                return found
        return None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. NobodyReads comes out, where click itself would end the process."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise NobodyReads from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """All of them in a line each, none of them imported."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, what, _ in COMMANDS])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names that begin so, none of them imported."""
        found = [
            CompletionItem(name, help=what)
            for name, what, _ in COMMANDS
            if name.startswith(incomplete)
        ]
        return found or click.Command.shell_complete(self, ctx, incomplete)


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"kvd {kvd.__version__}")
        ctx.exit()


CLI = Commands(
    "kvd",
    help=(
        "A daemon that keeps the KV cache of LLM engines in host memory.\n\n"
        "Exit codes: 0 done; 1 failed, or nobody answers; 2 misused; 3 done, and what it found is"
        " bad; 4 the daemon refused."
    ),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version and exit.",
        )
    ],
)
