"""The one writer and what it works with: movers, waiting jobs, the event log, turns."""
