"""What stateful tests of the machine draw from: engines, prompts, names."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.core.bench import spec

SESSIONS = (1, 2, 3)
# Two engines of two ranks share a namespace; a third, of another tenant, has two groups and
# shares with nobody.
SHARED = spec("a", "one", shards=2)
SPECS = {1: SHARED, 2: SHARED, 3: replace(spec("b", "two", 1, 2), unshared=True)}
RANKS = {1: 2, 2: 2, 3: 1}

# Prefixes of a few conversations, so that keys meet.
key_lists = st.builds(
    lambda start, length: list(range(start, start + length)),
    st.sampled_from([0, 4, 8, 20, 40, 60]),
    st.integers(1, 16),
)
# Further pieces of a job: which of its first keys they repeat, and how many copies end in between.
later_pieces = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 2)), max_size=2)
accounts = st.sampled_from(["", "", "salt"])
sessions = st.sampled_from(SESSIONS)
requests = st.sampled_from(["p", "q", "retains", "releases", "prefetches"])
groups = st.integers(0, 1)
node_counts = st.sampled_from([1, 1, 2, 3])


def dealt(extents: int, nodes: int) -> tuple[int, ...]:
    """The node of each extent, in about equal shares; empty where there is only one."""
    return tuple(extent * nodes // extents for extent in range(extents)) if nodes > 1 else ()
