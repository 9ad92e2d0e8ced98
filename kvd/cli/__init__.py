"""Commands that ask a running daemon, and how they print."""
