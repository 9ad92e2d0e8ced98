"""kvd, whose tiers' processes are started again and given up as lost soon: for loops of crashes."""

from __future__ import annotations

import sys

from kvd.__main__ import main
from kvd.tiers import keeper, process

if __name__ == "__main__":
    keeper.FIRST_WAIT_S = 0.5
    keeper.LONGEST_WAIT_S = 1.0
    process.LATE_S = 1.0
    sys.exit(main())
