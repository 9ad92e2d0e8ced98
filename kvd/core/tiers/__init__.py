"""Blocks below host memory: sought there, brought up, and written down."""
