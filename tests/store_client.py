"""A c10d TCPStore client without torch, whose import takes seconds: stub workers start in no time.

The wire format is that of torch 2.11 to 2.14: a byte for the operation, little-endian numbers, texts with a
64-bit length before them, keys with a slash before them.
"""

import socket
import struct

_VALIDATE, _SET, _GET, _ADD, _CHECK = 0, 1, 3, 4, 5
_MAGIC = 0x3C85F7CE


class StoreClient:
    """`PrefixStore(prefix, TCPStore(host, port))`, as far as stubs need it. Not thread-safe."""

    def __init__(self, host: str, port: int, prefix: str):
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._prefix = prefix
        self._socket.sendall(struct.pack("<BI", _VALIDATE, _MAGIC))

    def set(self, key: str, value: str) -> None:
        self._socket.sendall(bytes([_SET]) + self._key(key) + _text(value.encode()))

    def get(self, key: str) -> str | None:
        """The value, None if there is none."""
        if not self.check(key):
            return None
        self._socket.sendall(bytes([_GET]) + self._key(key))
        (length,) = struct.unpack("<Q", self._receive(8))
        return self._receive(length).decode()

    def add(self, key: str, amount: int) -> int:
        self._socket.sendall(bytes([_ADD]) + self._key(key) + struct.pack("<q", amount))
        return struct.unpack("<q", self._receive(8))[0]

    def check(self, key: str) -> bool:
        self._socket.sendall(bytes([_CHECK]) + struct.pack("<Q", 1) + self._key(key))
        return self._receive(1) == b"\0"

    def _key(self, key: str) -> bytes:
        return _text(f"/{self._prefix}/{key}".encode())

    def _receive(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            more = self._socket.recv(length - len(data))
            if not more:
                raise ConnectionError("the store is gone")
            data += more
        return data


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
