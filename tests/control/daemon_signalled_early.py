"""`kvd serve` that is signalled while its modules are imported: the command line's, and its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from kvd.linux import signals

EARLY = (signal.SIGUSR1, signal.SIGHUP, *signals.IGNORED)


class Signalling:
    """Finds no module, and sends signals where one of these is looked for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> None:
        """None, always."""
        if name in ("kvd.cli.commands", "kvd.cli.serve"):
            for number in EARLY:
                os.kill(os.getpid(), number)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it (nohup)
    sys.meta_path.insert(0, Signalling())  # type: ignore[arg-type] # it has all that is called

    from kvd.__main__ import main

    sys.exit(main())
