"""Writing into a store, which has no rename: finished files go up one by one, the marker of completeness last.

What an interrupted writer has brought up is listed in the target's hidden folder `.ckptool-upload`, one small file for
each, so that the next one goes on from there. A store has no locks: two writers of one target are noticed by the check
before the marker, when they are noticed at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ckptool.core.parts import FileRecord
from ckptool.errors import StorageError, TargetExistsError
from ckptool.storage.digest import digest_file
from ckptool.storage.files import os_errors, read_json
from ckptool.storage.scratch import scratch_folder
from ckptool.storage.store import StoredFile
from ckptool.storage.store_path import StorePath

#: So many files go up at a time.
NUM_UPLOADS = 4

JOURNAL_FOLDER = ".ckptool-upload"
_STARTED = f"{JOURNAL_FOLDER}/started.json"

#: A folder with one of these is complete; they are written last, and removed first.
MARKERS = ("config.json", ".metadata")
_MODEL_FILES = (".metadata", "ckptool.json", "*.distcp", "*.safetensors")


class Upload:
    """A folder, or one file, being written into a store. `content` is where to write on this machine."""

    def __init__(self, target: StorePath, overwrite: bool = False, is_file: bool = False) -> None:
        """Raises TargetExistsError."""
        refuse_existing_in_store(target, overwrite, is_file)
        self.target = target
        self.is_file = is_file
        self._scratch = scratch_folder()
        self.content = Path(self._scratch.name, target.name)
        self._sent: dict[str, StoredFile] = {}

    @property
    def has_kept(self) -> bool:
        """True when another attempt can go on from something."""
        return bool(self._sent)

    def begin(self, key: str, resume: bool = True) -> dict[str, FileRecord]:
        """What an earlier attempt at the work `key` has brought up and is still there; anything else is removed, the
        markers first, so that nothing is taken for complete from here on."""
        if self.is_file:
            return {}
        kept = dict(self._kept(key)) if resume else {}
        names = sorted(self.target.names_below(), key=lambda name: (name not in MARKERS, name))
        for name in names:
            if name not in kept and (name.removeprefix(f"{JOURNAL_FOLDER}/").removesuffix(".json") not in kept):
                self._place(name).store.remove(self._place(name).key)
        self._put_json(_STARTED, {"key": key})
        self._sent.update((name, stored) for name, (_, stored) in kept.items())
        return {name: record for name, (record, _) in kept.items()}

    def keep(self, record: FileRecord, key: str) -> None:
        """Bring up a finished file, read it back, and note that it is there; it is then no longer on this machine.

        Raises StorageError when it doesn't read back as it was written.
        """
        stored = self._send(record.file, record.blake3)
        with os_errors(self.content):
            (self.content / record.file).unlink()
        note = {"key": key, "identity": stored.identity, "record": record.to_json()}
        self._put_json(f"{JOURNAL_FOLDER}/{record.file}.json", note)

    def send(self, files: Mapping[str, str]) -> None:
        """Bring up finished files, given with their BLAKE3, and read them back. No other attempt goes on from them."""
        with ThreadPoolExecutor(NUM_UPLOADS, "upload") as workers:
            for _ in workers.map(self._send, files.keys(), files.values()):
                pass
        for name in files:
            with os_errors(self.content):
                (self.content / name).unlink()

    def publish(self) -> None:
        """Bring up what is left, look whether all is there as it was sent, and write the marker.

        Raises StorageError when another writer has changed something meanwhile.
        """
        if self.is_file:
            self._send("", digest_file(self.content))
            self.discard()
            return
        left = [path.relative_to(self.content).as_posix() for path in self.content.rglob("*") if path.is_file()]
        left.sort(key=lambda name: (MARKERS.index(name) + 1 if name in MARKERS else 0, name))
        for name in left[:-1]:
            self._send(name, digest_file(self.content / name))
        self.check_sent()
        for name in left[-1:]:
            self._send(name, digest_file(self.content / name))
        for name in [n for n in self.target.names_below() if n.startswith(f"{JOURNAL_FOLDER}/")]:
            self._place(name).store.remove(self._place(name).key)
        self.discard()

    def discard(self) -> None:
        """Remove what is on this machine. What is in the store lacks its marker, and stays for the next attempt."""
        self._scratch.cleanup()

    def _place(self, name: str) -> StorePath:
        return self.target / name if name else self.target

    def _send(self, name: str, blake3: str) -> StoredFile:
        place = self._place(name)
        stored = place.store.put(place.key, self.content / name if name else self.content)
        if digest_file(place) != blake3:
            raise StorageError(f"{place} does not read back as it was written", hint="try again")
        self._sent[name] = stored
        return stored

    def check_sent(self) -> None:
        """Raises StorageError when something that was sent is not there any more as it was."""
        self.target.store.refresh()
        for name, stored in self._sent.items():
            place = self._place(name)
            now = place.store.files.get(place.key)
            if now is None or (now.num_bytes, now.identity) != (stored.num_bytes, stored.identity):
                raise StorageError(
                    f"{place} is not what was written there: does something else write to {self.target}?"
                )

    def _kept(self, key: str) -> Iterator[tuple[str, tuple[FileRecord, StoredFile]]]:
        for path in self.target.rglob("*.json"):
            name = path.key[len(self.target.key) :].lstrip("/")
            if not name.startswith(f"{JOURNAL_FOLDER}/") or name == _STARTED:
                continue
            note = read_json(path)
            try:
                record, identity, its_key = FileRecord.from_json(note["record"]), note["identity"], note["key"]
            except (KeyError, TypeError, ValueError):
                continue
            place = self.target / record.file
            stored = place.store.files.get(place.key)
            if its_key == key and stored and (stored.num_bytes, stored.identity) == (record.num_bytes, identity):
                yield record.file, (record, stored)

    def _put_json(self, name: str, value: dict[str, Any]) -> None:
        place = self._place(name)
        place.store.put_bytes(place.key, json.dumps(value).encode())


def refuse_existing_in_store(target: StorePath, overwrite: bool, is_file: bool) -> None:
    """Raise TargetExistsError unless nothing is at `target`, or only an unfinished upload, or it may be overwritten.

    Raises UnsupportedError where nothing can be written at all.
    """
    target.store.check_writable()
    taken = target.exists()
    unfinished = any(name.startswith(f"{JOURNAL_FOLDER}/") for name in target.names_below())
    if not taken or (unfinished and not any((target / marker).is_file() for marker in MARKERS)):
        return
    if is_file != target.is_file():
        raise TargetExistsError(f"{target} is in the way and can't be replaced", hint="choose another name")
    if not overwrite:
        raise TargetExistsError(f"{target} already exists", hint="choose another name, or replace it with --overwrite")
    if not is_file and not any(any(target.glob(pattern)) for pattern in _MODEL_FILES):
        raise TargetExistsError(
            f"{target} is a folder without a model in it, and is not overwritten", hint="remove it yourself first"
        )
    inner = [name for name in target.names_below() if name.endswith("/.metadata")]
    if inner:
        raise TargetExistsError(
            f"{target} holds another checkpoint, {inner[0]}, and is not overwritten", hint="remove it yourself first"
        )
