"""Lookups, stores and loads, and the transfers that carry them out."""
