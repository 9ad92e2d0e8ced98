"""Secondary tiers: where blocks go that host memory has no room for.

`store` is the seam. A store runs in a process of its own, which maps the pool's extents and can
be killed; control never imports one.
"""
