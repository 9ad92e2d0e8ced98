"""A real daemon that hostile engines write to by every way in, beside a neighbour that works on.

Ways in: every RPC with drawn messages and raw bytes, session streams in any order, the companion
socket with and without descriptors, and the ring of a registered rank. Each input must have a
typed answer in time; the daemon must live, not grow, and the neighbour's bytes be right.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc

from kvd.control.errors import INTERNAL, STATUS_OF
from kvd_proto import layout
from kvd_proto.limits import MAX_MESSAGE_BYTES
from kvd_proto.v1 import companion_pb2, engine_pb2, events_pb2, operator_pb2
from tests.control.daemon_rig import Caller, RawEngine, details_of, identity
from tests.faults.scene import MIB, Scene, links
from tests.faults.stand import ROLES, SERVICES, resident_kib
from tests.fuzz.messages import Known, drawn
from tests.fuzz.targets import mutated

ANSWER_SECONDS = 25.0
AT_ONCE = 24  # calls under way
BLOCKS = 16  # that the neighbour stores and loads after each round
NEIGHBOUR_SECONDS = 20.0
GROWTH_KIB = 48 << 10  # of the daemon's own memory, after the first rounds
WARM_ROUNDS = 4
SPARE_DESCRIPTORS = 64
VICTIM_ROUNDS = 6  # after which the engine whose ids are used is another
MOST_BYTES = 400  # of an input that is worth keeping
LOG_CHARACTERS = 8000  # of the daemon, where it failed
METHODS = tuple(
    f"{service}.{method.name}"
    for service, module in SERVICES.items()
    for method in module.DESCRIPTOR.services_by_name[service].methods
)
DRAIN = "OperatorService.Drain"
WATCHED: dict[str, Any] = {
    "EventService.WatchEvents": events_pb2.WatchEventsRequest,
    "OperatorService.Record": operator_pb2.RecordRequest,
}
STREAMS = ("EngineService.Session", *WATCHED)
UNARY = tuple(method for method in METHODS if method not in STREAMS)

Seen = dict[tuple[str, str, str], bytes]  # an input for each answer of each method


class Untyped(AssertionError):
    """An answer that no client could understand, or none."""


class Live:
    """One daemon, its hostile engines and the neighbour."""

    def __init__(self, scene: Scene, dice: random.Random) -> None:
        self._scene, self._dice = scene, dice
        self.done: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.seen: Seen = {}
        self.rounds = 0
        self._first_kib = self._first_descriptors = 0
        self._neighbour = scene.engine("neighbour", model="neighbour")
        self._callers: dict[str, Caller] = {}
        self._victim: RawEngine | None = None
        self._renew()

    def close(self) -> None:
        for caller in self._callers.values():
            caller.close()
        if self._victim is not None:
            with contextlib.suppress(grpc.RpcError, OSError):
                self._victim.close()

    def round(self, inputs: int) -> None:
        """So many by each way in, and then a look at everything."""
        if self.rounds % VICTIM_ROUNDS == VICTIM_ROUNDS - 1:
            self._renew()
        self._neighbour.order("churn", prefixes=["a", "b", "c"], rounds=3, most=BLOCKS)
        self.calls(inputs)
        self.sessions(inputs // 8)
        self.watches(max(1, inputs // 64))
        self.companion(inputs // 2)
        self.ring(inputs)
        self.rounds += 1
        self._look()

    def _renew(self) -> None:
        self.close()
        path = self._scene.daemon.socket
        self._callers = {role: Caller(path, role) for role in ("SCHEDULER", "WORKER", "TOOL")}
        self._victim = RawEngine(path, identity=identity(f"victim {self.rounds}"))

    # -- what is drawn ----------------------------------------------------------------------

    def _known(self) -> Known:
        victim = self._victim
        assert victim is not None
        dice, due = self._dice, victim.scheduler.sequence + 1
        return {
            "session_id": [victim.scheduler.id],
            "registration_id": [victim.worker.registration],
            "sequence": [due, due, due + 1, 1],
            "job_id": [victim.scheduler.highest_job + dice.randint(0, 9)],
            "namespace_id": [0, 1, 2],
            "hash_bytes": [32],
            "hashes": [dice.randbytes(32 * dice.choice([1, 1, 2, 8, 64]))],
            "engine_blocks": [struct.pack("<I", dice.randrange(70)) * dice.choice([1, 1, 2, 8])],
            "group": [0],
            "first_block": [0],
            "engine_id": ["e0", f"hostile {dice.randrange(4)}"],
            "boot_nonce": [bytes(16), dice.randbytes(16)],
            "tenant": [""],
            "model": ["m"],
            "kv_dtype": ["f"],
            "hash_algorithm": ["sha256"],
            "tokens_per_block": [16],
            "blocks_per_block": [1],
            "shard_bytes": [4096],
            "world_size": [1, 1, 2],
            "rank": [0],
            "shard": [0],
            "memory_token": [7],
            "offset": [0],
            "stride": [4096],
            "bytes": [4096, 64 * 4096],
            "num_blocks": [64],
            "kind": [1],
            "deadline_ms": [1, 50, 200],
            "drain_seconds": [0],
        }

    def _content(self, of: Any) -> bytes:
        """A message's bytes; one in four is changed afterwards, or is no message at all."""
        dice = self._dice
        content: bytes = drawn(of, dice, self._known()).SerializeToString()
        match dice.randrange(16):
            case 0:
                return dice.randbytes(dice.choice([0, 1, 7, 100]))
            case 1:
                return content + content
            case 2 | 3:
                return mutated(content, dice)
            case 4 if self.seen:
                return mutated(dice.choice(list(self.seen.values())), dice)
        if dice.random() < 0.001:
            return content + bytes(MAX_MESSAGE_BYTES + dice.choice([-1, 0, 1]) - len(content))
        return content

    # -- ways in ----------------------------------------------------------------------------

    def calls(self, count: int) -> None:
        """Unary calls, many under way at once; some are sent again."""
        pending: list[tuple[str, bytes, Any]] = []
        for _ in range(count):
            if pending and self._dice.random() < 0.1:
                method, content, _ = self._dice.choice(pending)
            else:
                method = self._dice.choice(UNARY)
                if method == DRAIN and self._dice.random() < 0.9:  # nobody could do anything
                    continue
                content = self._content(input_of(method))
            pending.append((method, content, self._send(method, content)))
            if len(pending) >= AT_ONCE:
                self._settle(*pending.pop(0))
        for each in pending:
            self._settle(*each)
        self._undrain()

    def replay(self, method: str, content: bytes) -> None:
        """One call, as it was kept."""
        self._settle(method, content, self._send(method, content))

    def _send(self, method: str, content: bytes) -> Any:
        service, name = method.split(".")
        caller = self._callers[ROLES.get(service, "TOOL")]
        if service in ROLES and self._dice.random() < 0.8:  # the victim's own, else a stranger
            assert self._victim is not None
            own = self._victim.scheduler if service == "EngineService" else self._victim.worker
            caller = own
        channel: Any = caller.channel
        path = f"/kvd.v1.{service}/{name}"
        return channel.unary_unary(path).future(
            content, metadata=caller.metadata, timeout=ANSWER_SECONDS
        )

    def _settle(self, method: str, content: bytes, call: Any) -> None:
        try:
            call.result()
            answer = ("OK", "")
        except grpc.RpcError as error:
            answer = self._typed(method, content, error)
        self._keep(method, answer, content)

    def _typed(self, method: str, content: bytes, error: Any) -> tuple[str, str]:
        """Code and reason; Untyped where it has no reason of the list, or says that we broke."""
        info = details_of(error)
        if info is None and len(content) > MAX_MESSAGE_BYTES:
            return error.code().name, ""
        reason = info.reason if info is not None else ""
        if reason == INTERNAL or STATUS_OF.get(reason) is not error.code():
            log = self._scene.daemon.log.read_text(errors="replace")[-LOG_CHARACTERS:]
            raise Untyped(
                f"{method}: {error.code()} {reason} {error.details()}: {content!r}\n{log}"
            )
        return error.code().name, reason

    def _keep(self, method: str, answer: tuple[str, str], content: bytes) -> None:
        self.done[method.partition(".")[0]] += 1
        if len(content) <= MOST_BYTES:
            self.seen.setdefault((method, *answer), content)

    def sessions(self, count: int) -> None:
        """Streams: an opening that is right or not, and then messages in any order, some twice."""
        of = engine_pb2.SessionRequest.DESCRIPTOR
        for _ in range(count):
            messages = [self._content(of) for _ in range(self._dice.randint(0, 8))]
            if self._dice.random() < 0.8:
                messages.insert(0, self._opening())
            messages += self._dice.sample(messages, len(messages) // 4)
            caller = Caller(self._scene.daemon.socket, "SCHEDULER")
            try:
                channel: Any = caller.channel
                stream = channel.stream_stream("/kvd.v1.EngineService/Session")(
                    iter(messages), metadata=caller.metadata, timeout=ANSWER_SECONDS
                )
                for _ in stream:
                    pass
                answer = ("OK", "")
            except grpc.RpcError as error:
                longest = max(messages, key=len, default=b"")
                answer = self._typed("EngineService.Session", longest, error)
            finally:
                caller.close()
            self.done["messages of sessions"] += len(messages)
            self.ends[f"sessions that end {answer[1] or 'well'}"] += 1

    def _opening(self) -> bytes:
        known = self._known()
        of: Any = engine_pb2.OpenSession.DESCRIPTOR
        fields = engine_pb2.SessionRequest(open=drawn(of, self._dice, known))
        opening = fields.open
        if self._dice.random() < 0.7:
            opening.identity.engine_id = f"hostile {self._dice.randrange(4)}"
            opening.identity.boot_nonce = self._dice.randbytes(16)
            opening.world_size = 1
            opening.epoch = ""
            del opening.capabilities[:]
            namespace = opening.namespace
            namespace.Clear()
            namespace.model = f"m{self._dice.randrange(4)}"
            namespace.kv_dtype, namespace.hash_algorithm = "f", "sha256"
            namespace.tokens_per_block, namespace.hash_bytes = 16, 32
            namespace.groups.add(
                kind=1, tokens_per_block=16, blocks_per_block=1, shard_bytes=[4096]
            )
        return fields.SerializeToString()

    def watches(self, count: int) -> None:
        """Streams of events and recordings; each is left after what comes at once."""
        tool = self._callers["TOOL"]
        for number in range(count):
            method, of = list(WATCHED.items())[number % len(WATCHED)]
            content = self._content(of.DESCRIPTOR)
            channel: Any = tool.channel
            stream = channel.unary_stream(f"/kvd.v1.{method.replace('.', '/')}")(
                content, metadata=tool.metadata, timeout=0.5
            )
            answer = ("OK", "")
            try:
                next(stream, None)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # nothing new for it
                    answer = self._typed(method, content, error)
            stream.cancel()
            self._keep(method, answer, content)

    def companion(self, count: int) -> None:
        """Frames, whole and broken, with descriptors of any kind; until the daemon hangs up."""
        of, dice = companion_pb2.CompanionRequest.DESCRIPTOR, self._dice
        hello = companion_pb2.CompanionRequest(hello=companion_pb2.Hello(role="PEER_ROLE_TOOL"))
        left = count
        while left > 0:
            with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
                raw.settimeout(ANSWER_SECONDS)
                raw.connect(f"{self._scene.daemon.socket}.companion")
                frames = [self._content(of) for _ in range(dice.randint(1, 12))]
                if dice.random() < 0.8:
                    frames.insert(0, hello.SerializeToString())
                left -= len(frames)
                self.done["companion"] += len(frames)
                for content in frames:
                    self._send_frame(raw, content)
                    if not self._hear(raw):
                        break

    def _send_frame(self, raw: socket.socket, content: bytes) -> None:
        dice = self._dice
        length = dice.choice([len(content)] * 20 + [0, 65536, 65537, 2**32 - 1])
        fds = [
            fd for _ in range(dice.choice([0, 0, 0, 1, 1, 2, 8])) for fd in some_descriptor(dice)
        ]
        try:
            whole = struct.pack("<I", length) + content
            if fds:
                socket.send_fds(raw, [whole], fds)
            else:
                raw.sendall(whole)
            if length > len(content):  # the rest never comes
                raw.shutdown(socket.SHUT_WR)
        finally:
            for fd in fds:
                os.close(fd)

    def _hear(self, raw: socket.socket) -> bool:
        """One answer; False at the end. Untyped where there is none in time, or nonsense."""
        try:
            head = raw.recv(4, socket.MSG_WAITALL)
            if len(head) < 4:
                return False
            (length,) = struct.unpack("<I", head)
            body, fds, _, _ = socket.recv_fds(raw, length, 8, socket.MSG_WAITALL)
        except TimeoutError as error:
            raise Untyped("a companion's frame was not answered") from error
        for fd in fds:
            os.close(fd)
        if companion_pb2.CompanionResponse.FromString(body).WhichOneof("kind") is None:
            raise Untyped(f"an answer without a kind: {body!r}")
        return True

    def ring(self, count: int) -> None:
        """The victim scribbles over its ring while jobs are under way, and wakes its mover."""
        victim, dice = self._victim, self._dice
        assert victim is not None
        ring_fd, _, event_fd, _ = victim.worker._descriptors[-4:]
        heads = [0, 8, 16, layout.RING_TAIL_OFFSET, layout.RING_HEAD_OFFSET]
        for number in range(count):
            at = dice.choice([*heads, 8 * dice.randrange(layout.RING_BYTES // 8)])
            job = victim.scheduler.highest_job + dice.randint(-2, 3)
            word = dice.choice([0, 1, 8191, 8192, 8193, max(job, 0), 2**63, 2**64 - 1])
            os.pwrite(ring_fd, struct.pack("<Q", word), at)
            if number % 16 == 0:
                os.eventfd_write(event_fd, dice.choice([1, 2**32, 2**62]))
                os.set_blocking(event_fd, False)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(event_fd)
                with contextlib.suppress(OSError):
                    os.pwrite(victim.worker.board_fd, b"\xff" * 8, 64)
        self.done["ring"] += count

    # -- after each round -------------------------------------------------------------------

    def _look(self) -> None:
        daemon, tool = self._scene.daemon, self._callers["TOOL"]
        assert not daemon.has_ended, daemon.log.read_text()[-4000:]
        quota = operator_pb2.SetQuotaRequest(tenant="default", quota_bytes=0)
        with contextlib.suppress(grpc.RpcError):
            tool.call(tool.operator.SetQuota, quota)
        said = self._neighbour.answer()
        assert said["wrong"] == [], said
        self._neighbour_works()
        kib, descriptors = resident_kib(daemon.pid), len(links(daemon.pid))
        if self.rounds <= WARM_ROUNDS:
            self._first_kib, self._first_descriptors = kib, descriptors
            return
        grown = kib - self._first_kib
        assert grown < GROWTH_KIB, f"memory grew by {grown} KiB after {self.done}"
        more = descriptors - self._first_descriptors
        assert more < SPARE_DESCRIPTORS, f"{more} more descriptors after {self.done}"

    def figures(self) -> str:
        """Memory and descriptors of the daemon's, after the first rounds and now."""
        pid = self._scene.daemon.pid
        first = f"{self._first_kib} KiB and {self._first_descriptors} descriptors after"
        now = f"{resident_kib(pid)} KiB and {len(links(pid))}"
        told = f"the daemon: {first} {WARM_ROUNDS} rounds, {now} after {self.rounds}"
        return f"{told}; {dict(self.ends)}"

    def _undrain(self) -> None:
        tool = self._callers["TOOL"]
        tool.call(tool.operator.Undrain, operator_pb2.UndrainRequest())

    def _neighbour_works(self) -> None:
        """It stores, and finds what it stored, whatever is thrown at the daemon."""
        deadline = time.monotonic() + NEIGHBOUR_SECONDS
        attempt = 0
        while True:
            self._neighbour.wait_usable()
            prompt = f"round {self.rounds} attempt {attempt}"
            stored = self._neighbour.store(prompt, BLOCKS)
            if stored and self._neighbour.load(prompt, BLOCKS) == stored == BLOCKS:
                self.ends["blocks of the neighbour"] += stored
                return
            assert time.monotonic() < deadline, "the neighbour can't work"
            attempt += 1


def input_of(method: str) -> Any:
    service, name = method.split(".")
    return SERVICES[service].DESCRIPTOR.services_by_name[service].methods_by_name[name].input_type


def some_descriptor(dice: random.Random) -> Iterator[int]:
    """One of a kind; the receiver must close it."""
    match dice.randrange(5):
        case 0:
            reading, writing = os.pipe()
            os.close(writing)
            yield reading
        case 1:
            yield os.eventfd(0)
        case 2:
            yield os.open("/proc/self/status", os.O_RDONLY)
        case _:
            memory = os.memfd_create("kvd-fuzz")
            os.ftruncate(memory, dice.choice([0, 1, 4096, 64 * 4096]))
            yield memory


@contextlib.contextmanager
def lives(dice: random.Random) -> Iterator[Live]:
    """A daemon of its own for them."""
    scene = Scene(**{"submit-deadline-seconds": 2, "copy-deadline-seconds": 2})
    scene.daemon.pool_bytes, scene.daemon.extent_bytes = 64 * MIB, MIB
    try:
        scene.daemon.start()
        live = Live(scene, dice)
        try:
            yield live
        finally:
            live.close()
    finally:
        scene.close()
