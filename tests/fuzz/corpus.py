"""One small input for each answer that each call has given: what is thrown first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.json")


def kept() -> Iterator[tuple[str, bytes]]:
    """Method and message of each."""
    for name, content in json.loads(CORPUS.read_text()).items():
        yield name.split(" ")[0], bytes.fromhex(content)


def keep(path: Path, seen: dict[tuple[str, str, str], bytes]) -> None:
    """Write them, by method, code and reason."""
    calls = {
        " ".join(answer).strip(): content.hex()
        for answer, content in sorted(seen.items())
        if not answer[0].startswith(("EventService.", "OperatorService.Record"))
    }
    path.write_text(json.dumps(calls, indent=1) + "\n")
