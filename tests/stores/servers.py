"""Servers on loopback: a folder over HTTP with ranges and ETags, with faults on demand."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

#: What a fault does to one answer, by the number of the request.
Fault = Callable[[int], str]


class FolderServer(http.server.ThreadingHTTPServer):
    """Serves a folder. `fault(n)` is "" or what to do to the n-th GET of a file: cut, short, 503, stall-free errors."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.fault: Fault = lambda number: ""
        self.num_reads = 0
        self.num_bytes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FolderServer

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.server.folder / self.path.strip("/")
        if path.is_dir():
            names = [f"{child.name}/" if child.is_dir() else child.name for child in path.iterdir()]
            page = "".join(f'<a href="{name}">{name}</a>\n' for name in names).encode()
            self._send(200, page, {"Content-Type": "text/html"}, with_body)
            return
        if not path.is_file():
            self._send(404, b"", {}, with_body)
            return
        content = path.read_bytes()
        etag = f'"{hashlib.md5(content).hexdigest()}"'
        if self.headers.get("If-Match", etag) != etag:
            self._send(412, b"", {}, with_body)
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(match[1]), int(match[2]) + 1) if match else (0, len(content))
        headers = {"ETag": etag, "Accept-Ranges": "bytes"}
        if match:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self._send(206 if match else 200, content[start:end], headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        fault = ""
        if with_body and "Range" in self.headers:
            self.server.num_reads += 1
            self.server.num_bytes += len(body)
            fault = self.server.fault(self.server.num_reads)
        if fault == "503":
            status, body = 503, b""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
        if fault == "cut":
            self.close_connection = True


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[FolderServer]:
    with FolderServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
