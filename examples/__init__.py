"""Runnable examples; not part of either distribution."""
