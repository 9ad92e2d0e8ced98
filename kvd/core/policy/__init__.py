"""Eviction policies: which block goes first. One seam, `EvictionPolicy`, one contract suite."""
