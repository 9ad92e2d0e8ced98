"""Processes that control starts by exec and can kill, movers and tiers: what both kinds share.

`parent.OwnedProcess` is control's side and `child` the process's own; `framing` is what they say
it in, `mappings` how such a process reaches the pool's extents.
"""
