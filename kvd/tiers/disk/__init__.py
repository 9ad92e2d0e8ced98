"""The disk tier: blocks in preallocated slab files, one a directory.

`store` is what the tier's process opens; it spreads keys over disks. A `disk` is a directory: a
slab of blocks, and an index of it. `space` says which part of the slab is whose, `kinds` which
blocks are alike, `transfers` moves bytes, `rows` writes the index behind, to the `index_file`.

Of scopes apart: a read gives bytes only under the key that they were written under, proved by the
block's seal; what fails the proof is zeroed where it was read to. A place is written over whole
when another block gets it, whoever's it was. What is deleted is zeroed in the slab, and that and
the index are on the disk, before the call returns; a block that left to make room stays in the
slab, unreachable, until its place is used again. The file system may keep what it zeroed elsewhere
on the medium, and a disk does: who must exclude that needs an encrypted disk.
"""
