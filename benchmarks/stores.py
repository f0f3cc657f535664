"""Importing a model from an S3 server: ckptool, and what a parallel download by s3fs alone takes.

    python benchmarks/stores.py --gigabytes 3
    python benchmarks/stores.py --gigabytes 3 --latency-ms 50 --mb-per-s 200
    python benchmarks/stores.py steps --steps 1000

The server (`serve`, a process of its own on loopback) answers lists and ranged reads of a folder, each answer after the
latency, all of them together at no more than the bandwidth. The peer fetches ranges of 8 MiB, 16 at a time, with s3fs's
`cat_ranges`, writes them to files and flushes those; it neither checks nor converts. The bandwidth-bound time is bytes
over bandwidth. `steps` lists a root with many checkpoints. Writes benchmarks/results/stores*.md and .jsonl.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import click
from measure import in_turns, machine, run, table, write_rows

RESULTS = Path(__file__).parent / "results"
RANGE_BYTES = 8 << 20
NUM_RANGES = 16
_PIECE_BYTES = 256 << 10

PEER = """
import os, sys
import fsspec
source, target, range_bytes, num_ranges = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
fs = fsspec.filesystem("s3", config_kwargs={"max_pool_connections": num_ranges})
os.makedirs(target)
found = fs.find(source, detail=True)
files = {path: os.open(os.path.join(target, os.path.basename(path)), os.O_CREAT | os.O_WRONLY) for path in found}
sizes = {path: info["size"] for path, info in found.items()}
ranges = [(p, s, min(s + range_bytes, sizes[p])) for p in files for s in range(0, sizes[p], range_bytes)]
for first in range(0, len(ranges), num_ranges):
    batch = ranges[first : first + num_ranges]
    for (path, start, _), data in zip(batch, fs.cat_ranges(*map(list, zip(*batch)))):
        os.pwrite(files[path], data, start)
for file in files.values():
    os.fsync(file)
"""


class Server(http.server.ThreadingHTTPServer):
    """As much of S3 as reading takes: HEAD, GET with a range, and ListObjectsV2 of one bucket, a folder."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.latency_s, self.bytes_per_s = folder, latency_s, bytes_per_s
        self.names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        self._lock, self._free_at_s = threading.Lock(), 0.0

    def take(self, num_bytes: int) -> None:
        if self.bytes_per_s:
            with self._lock:
                now_s = time.monotonic()
                self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self.bytes_per_s
                wait_s = self._free_at_s - now_s
            time.sleep(wait_s)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        time.sleep(self.server.latency_s)
        parts = urlsplit(self.path)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        if not key:
            self._send_list(parse_qs(parts.query).get("prefix", [""])[0], parse_qs(parts.query))
            return
        path = self.server.folder / key
        if not path.is_file():
            self._send(404, {}, b"")
            return
        size = path.stat().st_size
        start, end = 0, size
        if with_body and "Range" in self.headers:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, end = int(first), min(size, int(last) + 1)
        self.send_response(206 if end - start < size else 200)
        self.send_header("ETag", f'"{size:x}-{path.stat().st_mtime_ns:x}"')
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.send_header("Content-Length", str(end - start))
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        if with_body:
            self.wfile.flush()
            with path.open("rb") as file:
                while start < end:
                    count = min(_PIECE_BYTES, end - start)
                    self.server.take(count)
                    start += os.sendfile(self.connection.fileno(), file.fileno(), start, count)

    def _send_list(self, prefix: str, query: dict[str, list[str]]) -> None:
        after = query.get("continuation-token", [""])[0]
        names = [name for name in self.server.names if name.startswith(prefix) and name > after]
        page, more = names[:1000], len(names) > 1000
        rows = "".join(self._row(name) for name in page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        body = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}"
            "</ListBucketResult>"
        )
        self._send(200, {"Content-Type": "application/xml"}, body.encode())

    def _row(self, name: str) -> str:
        stat = (self.server.folder / name).stat()
        modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stat.st_mtime))
        return (
            f"<Contents><Key>{escape(name)}</Key><Size>{stat.st_size}</Size><LastModified>{modified}</LastModified>"
            f'<ETag>"{stat.st_size:x}-{stat.st_mtime_ns:x}"</ETag></Contents>'
        )

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextlib.contextmanager
def serving(folder: Path, latency_ms: float = 0, mb_per_s: float = 0) -> Iterator[None]:
    """A server process of the folder as `s3://bucket`; the environment says where it is."""
    command = [sys.executable, __file__, "serve", str(folder), str(latency_ms), str(mb_per_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(keys, AWS_ENDPOINT_URL=process.stdout.readline().strip())
    try:
        yield
    finally:
        process.kill()
        process.wait()


@click.group(invoke_without_command=True)
@click.option("--gigabytes", default=3.0, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--latency-ms", default=0.0, show_default=True)
@click.option("--mb-per-s", default=0.0, show_default=True, help="Bandwidth of the server; 0: as it comes.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for the data (default: a temporary one).")
@click.option("--write/--no-write", default=True, help="Write the results down.")
@click.pass_context
def main(
    ctx: click.Context,
    gigabytes: float,
    rounds: int,
    latency_ms: float,
    mb_per_s: float,
    work: Path | None,
    write: bool,
) -> None:
    """Import and download in turn."""
    if ctx.invoked_subcommand:
        return
    with tempfile.TemporaryDirectory(dir=work, prefix="stores-") as name:
        folder = Path(name)
        make = [sys.executable, str(Path(__file__).with_name("convert.py")), "make", str(folder / "bucket" / "hf")]
        subprocess.run([*make, str(gigabytes)], check=True)
        num_bytes = sum(path.stat().st_size for path in (folder / "bucket").rglob("*.safetensors"))
        out = str(folder / "out")
        commands = {
            "s3fs": [sys.executable, "-c", PEER, "bucket/hf", out, str(RANGE_BYTES), str(NUM_RANGES)],
            "ckptool import-hf": [sys.executable, "-m", "ckptool", "import-hf", "-q", "s3://bucket/hf", out],
        }
        with serving(folder / "bucket", latency_ms, mb_per_s):
            rows = in_turns(commands, rounds, before=lambda name: shutil.rmtree(out, ignore_errors=True))
    bound = ""
    if mb_per_s:
        seconds = num_bytes / mb_per_s / 1e6
        median = statistics.median(usage.wall_seconds for usage in rows["ckptool import-hf"])
        bound = f"\nBandwidth-bound: {seconds:.2f} s, {seconds / median:.2f} of what the import takes.\n"
    text = (
        f"{num_bytes / 1e9:.2f} GB, latency {latency_ms:g} ms, bandwidth {mb_per_s:g} MB/s (0: as it comes), {rounds} "
        f"rounds, {machine()}\n\n{table(rows, 's3fs')}\n{bound}"
    )
    print(text)
    if write:
        stem = f"stores-{gigabytes:g}gb" + (f"-{latency_ms:g}ms" if latency_ms else "")
        write_rows(RESULTS / f"{stem}.jsonl", rows)
        (RESULTS / f"{stem}.md").write_text(text)


@main.command()
@click.option("--steps", default=1000, show_default=True)
@click.option("--files", default=10, show_default=True, help="Files of each checkpoint.")
def steps(steps: int, files: int) -> None:
    """How long `ckptool ls` takes on a root with many checkpoints; its start is in it."""
    with tempfile.TemporaryDirectory(prefix="stores-") as name:
        for step in range(steps):
            folder = Path(name, "bucket", "runs", f"step-{step}")
            folder.mkdir(parents=True)
            for file in (".metadata", *(f"__{rank}_0.distcp" for rank in range(files - 1))):
                (folder / file).write_bytes(b"x")
        with serving(Path(name, "bucket")):
            usage = run("ls", [sys.executable, "-m", "ckptool", "ls", "--root", "s3://bucket/runs", "--quiet"])
    print(f"{steps} checkpoints of {files} files: {usage.wall_seconds:.2f} s, {usage.cpu_seconds:.2f} CPU s")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("latency_ms", type=float)
@click.argument("mb_per_s", type=float)
def serve(folder: Path, latency_ms: float, mb_per_s: float) -> None:
    """Serve a folder until killed; the first line says where."""
    server = Server(folder, latency_ms / 1e3, mb_per_s * 1e6)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
