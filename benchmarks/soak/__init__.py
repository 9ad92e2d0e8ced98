"""Engines that replay traces for long, and whether anything of the daemon's grows meanwhile."""
