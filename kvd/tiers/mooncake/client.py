"""Mooncake's own client, asked key by key and held to answer for each.

It never raises and gives a code for every key. Two habits of its (release 0.3.13) are kept from
who calls:

- Without a master every call takes some five seconds, whatever was set. So once one has found
  none, all others are refused at once, while one thread asks again and again.
- It waits 60 s for a node, and then returns though bytes may still come, into memory that is no
  longer lent. So a call of that length never returns: whoever waits for it ends the process.

It has two ways to move bytes. By the one, who waits looks for the end of it without a pause, and
takes a processor from those who move the bytes. By the other they move one after the other, who
waits sleeps, and the master tells what is there before anything moves: so that is taken. But where
a node is gone each stretch takes a second to fail. So one value goes first, then many while values
move well; and the first way is taken for a while once one failed, and for values of many stretches.

Who waits so looks again after 10 us of sleep, thousands of times for a few MiB. That is more of a
processor than the bytes take. So such sleeps last longer, the more bytes move.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kvd.linux import calls
from kvd.processes import extras
from kvd.processes.complaints import log_limited
from kvd.tiers.mooncake import codes
from kvd.tiers.mooncake.codes import require_codes
from kvd.tiers.mooncake.options import MooncakeOptions
from kvd.tiers.store import LibraryMissing, TierError, TierReason

GIVES_UP_S = 55.0  # a little less than Mooncake itself
ASK_AGAIN_S = 0.5  # for the master, once it did not answer
MAX_IN_TURN = 64  # stretches; to a node that is gone the library takes a second for each
MAX_OF_ONE_IN_TURN = 8  # likewise of one value
PROVEN_S = 1.0  # values have moved well, and so many more go in one call
IN_DOUBT_S = 10.0  # after a node failed: as long as the master believes in it by default
# Of sleep between looks for a call's end: a sixteenth of what its bytes take at a GB/s. By RDMA
# they take less than Linux' own 50 us.
LOOK_NS_PER_BYTE = {"tcp": 1 / 16, "rdma": 0.0}
LEAST_LOOK_NS = 50_000
MOST_LOOK_NS = 1_000_000
_JOIN_S = 1.0
_SOME_NAME = "kvd1-"  # no block's
_LEAST_SAID = "_ZN3fLI17FLAGS_minloglevelE"  # the library's logger has it by this name
_FATAL = 3

Answer = TypeVar("Answer")
Addresses = Sequence[Sequence[int]]
Sizes = Sequence[Sequence[int]]


def load_library() -> Any:
    """Mooncake's own module. LibraryMissing, with what to install, where it can't be loaded."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise LibraryMissing(
            f"Mooncake's client can't be loaded ({error})",
            f"{extras.install('mooncake')}, and Debian's libibverbs1, libnuma1 and libcurl4",
        ) from None


class MooncakeClient:
    """One connection to a cluster, for any thread. No call after `close`: the library crashes."""

    def __init__(self, library: Any, replication: Any, look_ns_per_byte: float) -> None:
        """`library`: a MooncakeDistributedStore that is set up; `replication`: its config."""
        self.library = library
        self.replication = replication
        self._look_ns_per_byte = look_ns_per_byte
        self._in_doubt_until = self._proven_until = 0.0
        self._closing = threading.Event()
        self._asking: threading.Thread | None = None
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, options: MooncakeOptions) -> MooncakeClient:
        """Find the master. LibraryMissing without the library; TierError where no master is."""
        says_as_told = "MC_LOG_LEVEL" in os.environ
        _set_environment(options)
        module = load_library()
        replication = module.ReplicateConfig()
        replication.replica_num = options.replicas
        library = module.MooncakeDistributedStore()
        code = library.setup(
            {
                "local_hostname": options.own_host(),
                "metadata_server": options.metadata,
                "global_segment_size": "0",  # the cluster's memory is its nodes' alone
                "local_buffer_size": "0",
                "protocol": options.protocol,
                "rdma_devices": options.devices,
                "master_server_addr": options.master,
                "tenant_id": options.tenant,
            }
        )
        if code != codes.OK:
            raise TierError(
                f"no Mooncake master answers at {options.master} (code {code})",
                TierReason.UNREACHABLE,
            )
        if not says_as_told:
            _silence(str(module.__file__))
        return cls(library, replication, LOOK_NS_PER_BYTE[options.protocol])

    @property
    def has_master(self) -> bool:
        """Whether the master answered when it was last asked."""
        return self._asking is None

    def require_master(self) -> None:
        """TierError while the master does not answer."""
        if not self.has_master:
            raise TierError("the Mooncake master does not answer", TierReason.UNREACHABLE)

    # -- blocks -----------------------------------------------------------------------------

    def exists(self, names: Sequence[str]) -> list[int]:
        """1, 0 or a code below 0 for each."""
        return self._watched(self.library.batch_is_exist(list(names)), len(names))

    # What writes or reads values does so in three steps: the master is asked, bytes move, the
    # master or the client is told that this is over. No name may be in two such at once.

    def begin_puts(self, names: Sequence[str], sizes: Sequence[int]) -> list[int]:
        """Have room for values of these sizes; a code for each. What is OK is to be ended by
        `end_puts` or `give_up_puts`, and can't be seen before."""
        begin = self.library.batch_put_session_start
        answers = self._watched(begin(list(names), list(sizes), self.replication), len(names))
        odd = [at for at, code in enumerate(answers) if code == codes.SIZE_DIFFERS]
        if odd:  # an earlier one was given up, and the master did not hear of it
            again = [names[at] for at in odd]
            self.give_up_puts(again)
            began = begin(again, [sizes[at] for at in odd], self.replication)
            for at, code in zip(odd, self._watched(began, len(again)), strict=True):
                answers[at] = code
        return answers

    def put(self, names: Sequence[str], addresses: Addresses, sizes: Sizes) -> list[int]:
        """Fill values that were begun from memory at several places. A code for each: its length;
        OK, where it has been ended, too; or why it failed."""

        def at_once(left: slice) -> list[int]:
            names_left = list(names[left])
            self.give_up_puts(names_left)
            found: list[int] = self.library.batch_put_from_multi_buffers(
                names_left, addresses[left], sizes[left], self.replication
            )
            return found

        return self._moved(
            self.library.batch_put_from_multi_buffer_ranges, at_once, names, addresses, sizes
        )

    def end_puts(self, names: Sequence[str]) -> list[int]:
        """Let these values be seen; a code for each."""
        return self._watched(self.library.batch_put_session_end(list(names)), len(names))

    def give_up_puts(self, names: Sequence[str]) -> None:
        """Forget these, which were begun."""
        self._watched(self.library.batch_put_session_revoke(list(names)), len(names))

    def begin_gets(self, names: Sequence[str]) -> list[int]:
        """Have these values stay for a while; a code for each."""
        return self._watched(self.library.batch_get_session_start(list(names)), len(names))

    def get(self, names: Sequence[str], addresses: Addresses, sizes: Sizes) -> list[int]:
        """Fill memory at several places with each value's first bytes; their length, or a code."""
        assert len(set(names)) == len(names), "a value is asked for twice in one call"

        def at_once(left: slice) -> list[int]:
            found: list[int] = self.library.batch_get_into_multi_buffers(
                list(names[left]), addresses[left], sizes[left]
            )
            return found

        return self._moved(
            self.library.batch_get_into_multi_buffer_ranges, at_once, names, addresses, sizes
        )

    def end_gets(self, names: Sequence[str]) -> None:
        """Forget where these were; asks nobody."""
        self.library.batch_get_session_end(list(names))

    def get_heads(
        self, names: Sequence[str], address: int, places: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Fill memory with the first bytes of each value; so many, or a code. `places` are an
        offset from `address` and a size for each."""
        found = _in_time(
            lambda: self.library.get_into_ranges(
                [address],
                [list(names)],
                [[[offset] for offset, _ in places]],
                [[[0]] * len(names)],
                [[[size] for _, size in places]],
            )
        )
        flat = [each[0] for each in found[0]] if found else []
        return self._watched(flat, len(names))

    def lengths(self, names: Sequence[str]) -> list[int | None]:
        """How long each value is, None where there is none."""
        known = self.library.batch_get_replica_desc(list(names))
        return [_length(known.get(name, ())) for name in names]

    def remove(self, names: Sequence[str]) -> list[int]:
        """Forget these, though somebody may read them; a code for each."""
        return self._watched(self.library.batch_remove(list(names), True), len(names))

    def remove_beginning(self, beginning: str) -> int:
        """Forget all names that begin so, but for those that are being written; their number.

        `beginning` is made of letters, digits and "-" alone. The master looks at every name.
        """
        (found,) = self._watched([self.library.remove_by_regex(f"^{beginning}", True)], 1)
        return found

    def _moved(
        self,
        in_turn: Callable[..., list[int]],
        at_once: Callable[[slice], list[int]],
        names: Sequence[str],
        addresses: Addresses,
        sizes: Sizes,
    ) -> list[int]:
        """Move some values after the other, until a node fails; then, for a while, all at once."""
        found: list[int] = []
        while len(found) < len(names):
            few = self._some_in_turn(sizes, len(found))
            if not few:
                some = slice(len(found), len(names))
                answers = _in_time(functools.partial(at_once, some))
            else:
                some = slice(len(found), len(found) + few)
                offsets = [_offsets(each) for each in sizes[some]]
                calls.set_timer_slack(self._look_ns(sizes[some]))
                call = functools.partial(in_turn, list(names[some]), addresses[some], sizes[some])
                answers = _in_time(functools.partial(call, offsets))
            if codes.TRANSFER_FAILED in answers:
                self._in_doubt_until = time.monotonic() + IN_DOUBT_S
                self._proven_until = 0.0
            elif few and any(code > 0 for code in answers):
                self._proven_until = time.monotonic() + PROVEN_S
            found += require_codes(answers, len(names[some]))
        return self._watched(found, len(names))

    def _some_in_turn(self, sizes: Sizes, first: int) -> int:
        """How many values, from this one on, go one after the other. 0: none, but all at once."""
        now = time.monotonic()
        if now < self._in_doubt_until:
            return 0
        most = MAX_IN_TURN if now < self._proven_until else 1
        stretches = count = 0
        for each in itertools.islice(sizes, first, first + most):
            stretches += len(each)
            if len(each) > MAX_OF_ONE_IN_TURN or stretches > MAX_IN_TURN:
                break
            count += 1
        return count

    def _look_ns(self, sizes: Sizes) -> int:
        """How long to sleep between looks for the end of a call that moves these, in turn."""
        look_ns = int(sum(map(sum, sizes)) * self._look_ns_per_byte)
        return min(max(look_ns, LEAST_LOOK_NS), MOST_LOOK_NS)

    # -- memory -----------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> bool:
        """Let the network read and write this memory. False: it can't."""
        return bool(self.library.register_buffer(address, nbytes) == codes.OK)

    def unregister(self, address: int) -> None:
        """End that."""
        self.library.unregister_buffer(address)

    def close(self) -> None:
        """Leave the cluster. No call may be under way."""
        self._closing.set()
        with self._lock:
            asking = self._asking
        if asking is not None:
            asking.join(_JOIN_S)
            if asking.is_alive():  # within a call, and so the library can't be closed
                return
        self.library.close()

    # -- the master -------------------------------------------------------------------------

    def _watched(self, found: Sequence[int], count: int) -> list[int]:
        """The codes; where the master did not answer it is asked by a thread from now on."""
        answers = require_codes(found, count)
        if not codes.WITHOUT_MASTER.isdisjoint(answers):
            with self._lock:
                if self._asking is None and not self._closing.is_set():
                    asking = threading.Thread(
                        target=self._ask_master, name="mooncake-master", daemon=True
                    )
                    # Where there are no more threads, the next call that finds no master tries.
                    with contextlib.suppress(RuntimeError):
                        asking.start()
                        self._asking = asking
        return answers

    def _ask_master(self) -> None:
        while not self._closing.wait(ASK_AGAIN_S):
            (answer,) = self.library.batch_is_exist([_SOME_NAME])
            if answer >= 0:
                with self._lock:
                    self._asking = None
                return


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each piece of a value begins, of which these are the sizes."""
    return [0] if len(sizes) == 1 else [0, *itertools.accumulate(sizes[:-1])]


def _in_time(call: Callable[[], Answer]) -> Answer:
    """What the call gave. It does not return where memory may be touched later on."""
    began = time.monotonic()
    found = call()
    if time.monotonic() - began >= GIVES_UP_S:
        log_limited("a node of Mooncake's took so long that bytes of it may still come")
        while True:
            time.sleep(3600)
    return found


def _length(replicas: Iterable[Any]) -> int | None:
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return None


def _silence(library: str) -> None:
    """Have it say no more but what it dies of: it has a line for each block that fails.

    What it said while it was set up stands in the log. Each code is counted by who asks.
    """
    try:
        calls.set_number_of(library, _LEAST_SAID, _FATAL)
    except (OSError, ValueError) as error:  # another release has another logger
        log_limited(f"Mooncake's own lines can't be kept out of this log: {error}")


def _set_environment(options: MooncakeOptions) -> None:
    """What the library reads when it is loaded. What the site has set stays as it is."""
    timeout_ms = str(int(options.rpc_timeout_seconds * 1000))
    for name, value in (
        ("MC_RPC_TIMEOUT_MS", timeout_ms),
        ("MC_RPC_CONNECT_TIMEOUT_MS", timeout_ms),
        ("MC_STORE_CLIENT_SETUP_RETRIES", "1"),  # the process is started again in any case
        ("MC_RPC_CLIENT_IO_THREADS", "2"),
        # What waits for one node: of more than 1024 pieces some would fail after a second.
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
        ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535"),
        ("MC_TCP_ADMISSION_TIMEOUT_MS", timeout_ms),
        ("MC_LOG_LEVEL", "ERROR"),
    ):
        os.environ.setdefault(name, value)
