"""Where the processes of one engine meet: its scheduler, and its ranks with their movers."""
