"""What the drivers of stores are told, and how a range is fetched through each of them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ckptool.storage.fetch_ahead import NUM_CONNECTIONS

#: Protocol -> the extra that installs its driver.
EXTRAS = {
    **{"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"},
    **{"http": "http", "https": "http", "sftp": "sftp", "ssh": "sftp"},
}

#: Extra -> what has to be in the environment.
SETTINGS = {
    "azure": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

#: Extra -> the loggers that print when nobody has set up logging.
_LOGGERS = {"gcs": ("gcsfs",), "azure": ("adlfs", "azure"), "sftp": ("paramiko",), "s3": ("s3fs", "aiobotocore")}

#: A server that sends nothing for so long is asked again.
_SILENCE_SECONDS = 20.0

#: Large files go to S3 in parts of this size, a few at a time, which are in memory while sent. It takes 10,000.
PART_BYTES = 16 << 20
_NUM_PARTS = 4
_MOST_PARTS = 9000

#: How much of an answer is taken from the driver at a time; in one piece it would be in memory twice.
_PIECE_BYTES = 1 << 20


def driver_options(protocol: str) -> dict[str, Any]:
    """What drivers are told beyond what they find themselves; fsspec's own configuration goes before it."""
    import fsspec

    options: dict[str, Any] = {}
    if EXTRAS.get(protocol) == "s3":
        # Attempts are counted here; botocore's own five would multiply them, with waits of up to 20 s each.
        options = {"config_kwargs": {"max_pool_connections": 2 * NUM_CONNECTIONS, "retries": {"total_max_attempts": 2}}}
    elif EXTRAS.get(protocol) == "http":
        import aiohttp

        # Not for a whole answer, which may take long, but for a server that says nothing.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_SECONDS, sock_read=_SILENCE_SECONDS)
        options = {"client_kwargs": {"timeout": timeout}}
    return {name: value for name, value in options.items() if name not in fsspec.config.conf.get(protocol, {})}


def quiet(protocol: str) -> None:
    """Keep a driver from printing what it meets, tracebacks and all: it is said in one line in the end. Whoever has set
    up logging still gets it."""
    for name in _LOGGERS.get(EXTRAS.get(protocol, ""), ()):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())


def attempts_of(filesystem: Any, usual: int) -> int:
    """How often a call is tried here. Google's and Azure's drivers try several times themselves, with waits of up to
    half a minute."""
    return min(2, usual) if {"gs", "az", "abfs"} & set(protocols(filesystem)) else usual


def protocols(filesystem: Any) -> tuple[str, ...]:
    named = filesystem.protocol
    return (named,) if isinstance(named, str) else tuple(named)


def put_options(filesystem: Any, path: Path) -> dict[str, int]:
    """How a file is sent: s3fs would hold half a GB of it in memory."""
    if "s3" not in protocols(filesystem):
        return {}
    part_bytes = max(PART_BYTES, -(-path.stat().st_size // _MOST_PARTS))
    return {"chunksize": part_bytes, "max_concurrency": _NUM_PARTS}


def fetch_into(filesystem: Any, path: str, identity: str, start: int, out: memoryview) -> tuple[int, bool]:
    """Fill `out` with bytes of a file; how many came, and whether the server has compared the file's identity with the
    one given."""
    if not out:
        return 0, False
    if fetch := _fetch_in_pieces(filesystem):
        from fsspec.asyn import sync

        # What is no ETag is not compared.
        etag = identity if identity.startswith('"') else ""
        return sync(filesystem.loop, fetch, filesystem, path, etag, start, out), bool(etag)
    data = filesystem.cat_file(path, start=start, end=start + len(out))
    out[: len(data)] = data[: len(out)]
    return len(data), False


def comes_in_pieces(filesystem: Any) -> bool:
    """False where the driver gives a range as a whole, so that it is in memory twice."""
    return _fetch_in_pieces(filesystem) is not None


def _fetch_in_pieces(filesystem: Any) -> Callable[..., Awaitable[int]] | None:
    names = protocols(filesystem)
    return _fetch_from_s3 if "s3" in names else _fetch_over_http if "http" in names else None


async def _fetch_from_s3(filesystem: Any, path: str, etag: str, start: int, out: memoryview) -> int:
    bucket, key, _ = filesystem.split_path(path)
    wanted = {"Range": f"bytes={start}-{start + len(out) - 1}", **({"IfMatch": etag} if etag else {})}
    answer = await filesystem._call_s3("get_object", Bucket=bucket, Key=key, **wanted, **filesystem.req_kw)
    body = answer["Body"]
    async with body:
        return await _fill(out, body)


async def _fetch_over_http(filesystem: Any, path: str, etag: str, start: int, out: memoryview) -> int:
    options = dict(filesystem.kwargs)
    wanted = {"Range": f"bytes={start}-{start + len(out) - 1}", **({"If-Match": etag} if etag else {})}
    headers = {**options.pop("headers", {}), **wanted}
    session = await filesystem.set_session()
    async with session.get(filesystem.encode_url(path), headers=headers, **options) as answer:
        filesystem._raise_not_found_for_status(answer, path)
        return await _fill(out, answer.content)


async def _fill(out: memoryview, body: Any) -> int:
    """The bytes of an answer; how many came, or one more than were wanted when it has more."""
    num_bytes = 0
    while piece := await body.read(_PIECE_BYTES):
        if num_bytes + len(piece) > len(out):
            return len(out) + 1
        out[num_bytes : num_bytes + len(piece)] = piece
        num_bytes += len(piece)
    return num_bytes
