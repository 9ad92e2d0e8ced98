"""The disk tier: blocks in preallocated slab files, one a directory.

`store` is what the tier's process opens; it spreads keys over disks. A `disk` is a directory: a
slab of blocks, and an index of it. `space` says which part of the slab is whose, `transfers` moves
bytes, `rows` writes the index behind, to the `index_file`.
"""
