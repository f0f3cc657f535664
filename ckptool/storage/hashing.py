"""Digests made while writing: a file that hashes what passes through, and tensors' sums collected on the way."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3

from ckptool.storage.digest import digest_file
from ckptool.storage.digests_file import DIGESTS_FILE, Digests, FileDigest, TensorRecord, save_id_for
from ckptool.storage.direct_file import BUFFER_BYTES, DirectFile
from ckptool.storage.files import os_errors

#: Writes from this size on are hashed by a thread beside the writing one: BLAKE3 and the kernel both work without the
#: interpreter's lock.
_THREAD_BYTES = 256 << 10


class HashingFile:
    """A new file, written from its start on without seeking, that knows the digest of its bytes.

    It has what `torch.save` and torch's FileSystemWriter use of a file, and is on the disk once closed.
    """

    def __init__(self, path: Path, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Make the file, which must not exist yet; `buffer_bytes` as for DirectFile."""
        self._file = DirectFile(path, buffer_bytes)
        self._hasher = blake3()
        self._num_bytes = 0
        self._thread: ThreadPoolExecutor | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`, any object with the buffer interface; its size in bytes."""
        view = memoryview(data).cast("B")
        if len(view) < _THREAD_BYTES:
            self._hasher.update(view)
            self._file.write(view)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, "hash")
            hashed = self._thread.submit(self._hasher.update, view)
            try:
                self._file.write(view)
            finally:
                hashed.result()
        self._num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        """Nothing: `close` flushes."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._file.close()

    def abandon(self) -> None:
        """Close without writing what is still in buffers."""
        if self._thread is not None:
            self._thread.shutdown()
        self._file.abandon()

    def digest(self) -> FileDigest:
        """Of everything written so far."""
        return FileDigest(self._num_bytes, self._hasher.hexdigest())


def write_digests(folder: Path, files: Mapping[str, FileDigest], tensors: Mapping[str, TensorRecord]) -> str:
    """Write `digests.json`; return the `save_id` by which the commit marker covers it.

    `files` are those hashed while they were written; any other file in `folder` (sidecars, small) is read and hashed.
    """
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    with os_errors(folder):
        rest = {
            name: FileDigest(path.stat().st_size, digest_file(path))
            for name, path in found.items()
            if name not in files
        }
        raw = Digests({**files, **rest}, tensors).to_bytes()
        with (folder / DIGESTS_FILE).open("wb") as file:
            file.write(raw)
            os.fsync(file.fileno())
    return save_id_for(raw)
