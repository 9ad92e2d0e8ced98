"""However long a bucket's answer is, the tier's process takes in no more than it may have."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore is not here")

from tests.tiers.http_stand import serving
from tests.tiers.test_s3_answers import Alike, Answering, options_of

SENT_MIB = 512
OPENED_WITHIN_128_MIB = """
import json, sys
from kvd.tiers import kinds
kinds.S3_MEMORY_BYTES = 128 << 20
kinds.open_s3(json.loads(sys.argv[1])).close()
"""
OPENED_WITH_LARGE_STACKS = """
import json, sys
from kvd.tiers import kinds
kinds.open_s3(json.loads(sys.argv[1]) | {"threads": 256}).close()
"""
LARGE_STACK_KIB = 64 << 10


class Long(Alike):
    """Each answer is long: 200, and zeros."""

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(SENT_MIB << 20))
        self.end_headers()
        with suppress(OSError):
            for _ in range(SENT_MIB):
                self.wfile.write(bytes(1 << 20))


def test_an_answer_that_is_too_long_for_memory_ends_the_process_that_takes_it_in(
    tmp_path: Path,
) -> None:
    with serving(Answering(("127.0.0.1", 0), Long)) as server:
        given = json.dumps(options_of(server.server_port, tmp_path))
        command = [sys.executable, "-c", OPENED_WITHIN_128_MIB, given]
        ended = subprocess.run(command, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGABRT, ended.stderr.decode()
    assert b"memory allocation of" in ended.stderr


def test_threads_find_memory_whatever_the_limit_of_a_stack_is(tmp_path: Path) -> None:
    given = json.dumps(options_of(1, tmp_path))  # where nobody is: it is met later
    inner = [sys.executable, "-c", OPENED_WITH_LARGE_STACKS, given]
    command = ["sh", "-c", f'ulimit -S -s {LARGE_STACK_KIB} && exec "$@"', "sh", *inner]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
