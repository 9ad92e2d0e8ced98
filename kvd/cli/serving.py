"""`kvd serve`: its flags, one for each setting, and what is done before the daemon is built."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from kvd import config
from kvd.cli import last_words
from kvd.cli.exits import EXIT_MISUSED, Failure
from kvd.cli.interrupts import ends_at_once
from kvd.config.settings import DEFAULT_FILE, SETTINGS, Setting
from kvd.linux.proc import shows_the_machine, shows_this_process

WITHOUT_ASSERTS = (
    "Python runs without assertions, by which a daemon ends rather than serve wrong bytes: unset"
    " PYTHONOPTIMIZE, and leave out -O"
)
WITHOUT_PROC = (
    "/proc is not there, or is another pid namespace's, and by it the daemon tells which of its"
    " processes live: mount the one of its own (unshare --mount-proc, bwrap --proc /proc)"
)
ONLY_PROCESSES = (
    "/proc shows processes alone, and by it the daemon knows the machine's memory and boot: mount"
    " it without subset=pid, and leave systemd's ProcSubset=pid out"
)


def _option(setting: Setting) -> click.Option:
    said: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if setting.is_switch else {}
    return click.Option(
        [setting.flag, setting.name],
        metavar=setting.metavar,
        help=f"{setting.meaning} (default {setting.default_text})",
        **said,
    )


def _run(*, print_config: bool, check: bool, **flags: Any) -> int:
    try:
        settings = config.load(flags, os.environ)
    except config.ConfigError as error:
        if print_config or check:
            raise Failure(str(error), EXIT_MISUSED) from None
        return last_words.end(str(error), EXIT_MISUSED, error.log_format)
    if print_config:
        click.echo(config.as_toml(settings), nl=False)
        return 0
    if unfit := _why_unfit():
        if check:
            raise Failure(unfit, EXIT_MISUSED)
        return last_words.end(unfit, EXIT_MISUSED, settings.log_format)
    if check:
        from kvd.cli.doctor.command import check_place  # noqa: PLC0415 - see below

        return check_place(settings)
    # Named from now on: without the default file, all that it said would be taken back.
    named = flags | {"config": config.file_of(flags["config"], os.environ)}

    def read() -> config.Config:
        return config.load(named, os.environ, standing=settings)

    # Where no process can be started Python forks, and gRPC would end its threads before that and
    # wait for others after it, for ever.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    with ends_at_once():
        from kvd.cli import serve  # noqa: PLC0415 - gRPC, only for who serves

    return serve.serve(settings, read)


def _why_unfit() -> str:
    """Why no daemon may begin in this process; "" where one may."""
    if sys.flags.optimize:
        return WITHOUT_ASSERTS
    if not shows_this_process():
        return WITHOUT_PROC
    return "" if shows_the_machine() else ONLY_PROCESSES


class _Serve(last_words.Service):
    def log_format(self, given: Mapping[str, Any]) -> str:
        """Of the flag, the variable or the file; no log is begun where it would only look."""
        if given.get("check") or given.get("print_config"):
            return "text"
        texts = {name: text for name, text in given.items() if isinstance(text, str)}
        try:
            return config.load(texts, os.environ).log_format
        except config.ConfigError as error:
            return error.log_format


command = _Serve(
    "serve",
    callback=_run,
    short_help="Run the daemon.",
    help=(
        "Run the daemon until SIGTERM.\n\nEach setting may be a flag (--pool-bytes), a variable"
        " (KVD_POOL_BYTES), or a key of the configuration file (pool_bytes = ...). The first of"
        " these that is there counts; without any, the default does."
    ),
    params=[
        click.Option(
            ["--config"],
            metavar="FILE",
            help=f"TOML file of settings and tenants (default: KVD_CONFIG, else {DEFAULT_FILE})",
        ),
        click.Option(
            ["--print-config"], is_flag=True, help="Print the settings in force and exit."
        ),
        click.Option(
            ["--check"],
            is_flag=True,
            help="Check whether the daemon could start here, say what to change, and exit.",
        ),
        *(_option(setting) for setting in SETTINGS),
    ],
)
