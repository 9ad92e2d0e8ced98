"""`kvd replay`: what a policy would have found on a trace, by the daemon's own core."""

from kvd.cli.replay.command import add_arguments, run

__all__ = ["add_arguments", "run"]
