"""Offers a daemon a file of a FUSE file system whose server answers nothing any more.

    python -m tests.control.fuse_file COMPANION_SOCKET memory|device_memory

Prints what came of it: "unable", where nothing can be mounted here, or "offered". Then it waits
until its standard input ends; with it the mount does, and whoever waits for it gets an error.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path

from kvd_proto.v1 import companion_pb2 as pb

CLONE_NEWNS = 0x20000
MS_REC_PRIVATE = 0x4000 | 0x40000
MNT_DETACH = 2
# linux/fuse.h
LOOKUP, FORGET, GETATTR, OPEN, INIT = 1, 2, 3, 14, 26
ROOT, FILE = 1, 2
_IN = struct.Struct("=IIQQIIIHH")
_OUT = struct.Struct("=IiQ")
ENOSYS = 38


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o666
    return struct.pack("=6Q10I", node, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _reply(opcode: int, node: int) -> bytes | None:
    """None: no such call is known. Nothing may be kept: all is asked again."""
    if opcode == INIT:
        return struct.pack("=4I2H2I2H8I", 7, 31, 4096, 0, 1, 1, 4096, 1, 1, 0, *[0] * 8)
    if opcode == LOOKUP:
        return struct.pack("=4Q2I", FILE, 0, 0, 0, 0, 0) + _attributes(FILE)
    if opcode == GETATTR:
        return struct.pack("=Q2I", 0, 0, 0) + _attributes(node)
    if opcode == OPEN:
        return struct.pack("=Q2I", 1, 0, 0)
    return None


def _serve(device: int, until: int) -> None:
    """Answer until something can be read there."""
    while True:
        ready, _, _ = select.select([device, until], [], [])
        if until in ready:
            return
        _, opcode, unique, node, *_ = _IN.unpack_from(request := os.read(device, 1 << 17))
        if opcode != FORGET and request:
            content = _reply(opcode, node)
            error = -ENOSYS if content is None else 0
            content = content or b""
            os.write(device, _OUT.pack(_OUT.size + len(content), error, unique) + content)


def _mounted(directory: str) -> int:
    """The server's descriptor. OSError where this may not be done here."""
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    if (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None)
        or libc.mount(b"test", directory.encode(), b"fuse", 0, options)
    ):
        raise OSError(ctypes.get_errno(), "mount")
    return device


def _framed(request: pb.CompanionRequest) -> bytes:
    content = request.SerializeToString()
    return struct.pack("<I", len(content)) + content


def _offer(directory: str, path: str, kind: str, has_opened: int) -> None:
    """Open the file while its server answers, and have the daemon look at it afterwards."""
    file = os.open(f"{directory}/file", os.O_RDWR)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(_framed(pb.CompanionRequest(hello=pb.Hello(role=pb.PEER_ROLE_WORKER))))
        client.recv(4096)
        os.write(has_opened, b"!")
        offer = pb.OfferMemory(memory_token=1, device_memory=kind == "device_memory")
        message = _framed(pb.CompanionRequest(offer_memory=offer))
        socket.send_fds(client, [message], [file])
        print("offered", flush=True)  # noqa: T201
        signal.pause()


def _remove(directory: str) -> None:
    ctypes.CDLL(None).umount2(directory.encode(), MNT_DETACH)
    Path(directory).rmdir()


def main() -> None:
    """The server is the process that was started: whoever ends it ends the mount, too."""
    path, kind = sys.argv[1:]
    directory = tempfile.mkdtemp()
    try:
        device = _mounted(directory)
    except OSError:
        print("unable", flush=True)  # noqa: T201 - whoever started this reads it
        return
    finally:
        atexit.register(_remove, directory)
    told, telling = os.pipe()
    if (client := os.fork()) == 0:
        os.close(device)
        _offer(directory, path, kind, telling)
    _serve(device, told)
    sys.stdin.read()
    os.kill(client, signal.SIGKILL)
    os.close(device)
    os.waitpid(client, 0)


if __name__ == "__main__":
    main()
