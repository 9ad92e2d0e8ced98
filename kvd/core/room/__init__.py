"""Room for what is stored: eviction, rows that change hands, and what nobody uses any more."""
