"""One file or room a command: the daemon itself, what asks it, and what replays a trace."""
