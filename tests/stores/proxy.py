"""A TCP proxy on loopback that spoils connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

_PIECE_BYTES = 16 << 10
_REFUSAL = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass
class Faults:
    """What happens to connections. Every `every`-th one (0: none) suffers `kind`:

    cut: reset after `after_bytes` of the answer; short: closed there, as if all had come; refuse: answered with 503.
    """

    kind: str = ""
    every: int = 0
    after_bytes: int = 300
    #: Seconds that each piece takes longer, and bytes a second of each connection (0: as they come).
    latency_s: float = 0.0
    bytes_per_s: float = 0.0


class Proxy:
    """Passes connections on to `target`, a URL. `faults` may be changed at any time."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 80)
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = "http://{}:{}".format(*self._server.getsockname())
        self.faults = Faults()
        self.num_spoilt = 0
        self._number = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self._number += 1
                faults = self.faults
                is_spoilt = bool(faults.every) and self._number % faults.every == 0
                self.num_spoilt += is_spoilt
                threading.Thread(target=self._serve, args=(client, faults, is_spoilt), daemon=True).start()

    def _serve(self, client: socket.socket, faults: Faults, is_spoilt: bool) -> None:
        with client, contextlib.suppress(OSError):
            if is_spoilt and faults.kind == "refuse":
                _read_request(client)
                client.sendall(_REFUSAL)
                return
            with socket.create_connection(self._target) as server:
                threading.Thread(target=_pass_on, args=(client, server), daemon=True).start()
                _answer(server, client, faults, faults.kind if is_spoilt else "")


def _read_request(client: socket.socket) -> None:
    """As much of it that the answer finds a reader: headers, and what has come of the body."""
    client.settimeout(0.2)
    received = b""
    with contextlib.suppress(TimeoutError):
        while piece := client.recv(_PIECE_BYTES):
            received = received[-8:] + piece


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)


def _answer(server: socket.socket, client: socket.socket, faults: Faults, kind: str) -> None:
    num_bytes = 0
    while piece := server.recv(_PIECE_BYTES):
        time.sleep(faults.latency_s)
        if faults.bytes_per_s:
            time.sleep(len(piece) / faults.bytes_per_s)
        if kind and num_bytes + len(piece) > faults.after_bytes:
            client.sendall(piece[: faults.after_bytes - num_bytes])
            if kind == "cut":  # a reset, not an end
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.shutdown(socket.SHUT_RD)  # wakes the thread that reads, or the socket would stay open
            else:
                client.shutdown(socket.SHUT_RDWR)
            return
        client.sendall(piece)
        num_bytes += len(piece)
    client.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
