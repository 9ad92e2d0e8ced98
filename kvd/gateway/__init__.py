"""The way in for operators on other machines: mutual TLS in front, the daemon's socket behind.

A process of its own (decision 0026): strangers on a network cost it, and not the daemon.
"""
