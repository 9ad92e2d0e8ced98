"""Limits of messages: what the client may send and the daemon takes. docs/limits.md lists them."""

from __future__ import annotations

# The largest numbers that messages' fields have room for.
U32_MAX = (1 << 32) - 1
U64_MAX = (1 << 64) - 1

# Of gRPC. The largest legal one is a step of 8,192 keys of 64 bytes with 64 engine blocks each:
# 2.5 MiB, and a MiB of contexts around them. Each session's next message may take that much.
MAX_MESSAGE_BYTES = 4 << 20
MAX_COMPANION_BYTES = 65536  # of a message on the companion socket

# -- of one message ---------------------------------------------------------------------------

MAX_KEYS_PER_MESSAGE = 8192
MAX_QUERIES = 1024  # of a lookup
MAX_PARTS_PER_STEP = 1024  # loads, stores, touches and hand-offs: so many of each
MAX_RUNS = 64  # of a job, a touch or a hand-off
MAX_REQUESTS_TOLD = 64  # whose lookups one step tells of one by one; the others are only counted
MAX_PROMPT_BLOCKS = 16384  # of a request, while somebody records
MAX_PROMPT_BYTES = 2 << 20  # of the prompts that a step names then
MAX_IDS = 16384  # in each list of ids
MAX_STRING_BYTES = 256
MAX_EPOCH_BYTES = 64  # of an epoch's name
MAX_STRUCT_BYTES = 16 * 1024  # of transfer parameters, and of hints
MAX_TIERS = 8
MAX_REGIONS = 256  # of a rank's memory

# -- of an engine -----------------------------------------------------------------------------

MAX_JOBS_IN_FLIGHT = 4096  # of a session: not ended, and read by every rank
MAX_HASH_BYTES = 64
MAX_BLOCKS_PER_BLOCK = 64
MAX_GROUPS = 64
MAX_RANKS = 256
