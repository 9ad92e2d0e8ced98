"""`kvd completion`: what a shell evaluates to complete kvd's words."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kvd.cli.exits import Failure


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print a shell's script that completes kvd's words.

    For bash, add this to ~/.bashrc: eval "$(kvd completion bash)"
    """
    found = get_completion_class(shell)
    if found is None:
        raise Failure(f"there is no completion for {shell}")
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "kvd", "_KVD_COMPLETE").source())
    return 0
