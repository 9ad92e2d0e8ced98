"""The process behind tests.gpu.driver.Exporter: it owns device memory and does as it is told.

Its commands come over a socket, one JSON list each, and so do its answers; descriptors come along
with them. It ends when the socket does.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
import uuid
from typing import Any

from tests.gpu.device_memory import DeviceMemory, DriverError

LENGTH = struct.Struct("<Q")
MOST_DESCRIPTORS = 1


def send(connection: socket.socket, message: str, fds: list[int] | None = None) -> None:
    """Send a message, and descriptors with it."""
    content = message.encode()
    socket.send_fds(connection, [LENGTH.pack(len(content))], fds or [])
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[str | None, list[int]]:
    """The next message and its descriptors; None once the other side has ended."""
    head, fds, _, _ = socket.recv_fds(connection, LENGTH.size, MOST_DESCRIPTORS)
    if not head:
        return None, fds
    left = LENGTH.unpack(head)[0]
    parts = []
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            return None, fds
        parts.append(part)
        left -= len(part)
    return b"".join(parts).decode(), fds


class Commands:
    """What the parent may ask for, by method name."""

    def __init__(self, device: int) -> None:
        self._memory = DeviceMemory(device)

    def uuid(self) -> str:
        found = ctypes.create_string_buffer(16)
        self._memory.call("cuDeviceGetUuid_v2", found, self._memory.device)
        return f"GPU-{uuid.UUID(bytes=found.raw)}"

    def allocate(self, nbytes: int, kind: str) -> int:
        return self._memory.allocate(nbytes, kind)

    def write(self, address: int, content: str) -> None:
        self._memory.write(address, bytes.fromhex(content))

    def read(self, address: int, nbytes: int) -> str:
        return self._memory.read(address, nbytes).hex()

    def free(self, address: int) -> None:
        self._memory.free(address)

    def ipc_handle(self, address: int) -> tuple[str, int, int]:
        handle, offset, nbytes = self._memory.ipc_handle(address)
        return handle.hex(), offset, nbytes

    def export_fd(self, address: int) -> int:
        return self._memory.export_fd(address)

    def open_handle(self, handle: str) -> int:
        return self._memory.open_handle(bytes.fromhex(handle))

    def close_handle(self, address: int) -> None:
        self._memory.close_handle(address)

    def free_bytes(self) -> int:
        return self._memory.free_bytes()


def refuse(connection: socket.socket, error: DriverError) -> None:
    """Answer the first command by what kept this process from a device."""
    if receive(connection)[0] is not None:
        send(connection, json.dumps({"error": str(error), "code": error.code}))


def serve(connection: socket.socket, commands: Commands) -> None:
    """Answer until the other side ends; errors of the driver are answers."""
    while (message := receive(connection)[0]) is not None:
        command, *arguments = json.loads(message)
        fds: list[int] = []
        answer: dict[str, Any]
        try:
            answer = {"answer": getattr(commands, command)(*arguments)}
        except DriverError as error:
            answer = {"error": str(error), "code": error.code}
        if command == "export_fd" and "answer" in answer:
            fds = [answer["answer"]]
        send(connection, json.dumps(answer), fds)
        for fd in fds:
            os.close(fd)


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            commands = Commands(int(sys.argv[2]))
        except DriverError as error:
            refuse(connection, error)
            return
        serve(connection, commands)


if __name__ == "__main__":
    main()
