"""What torch.compile has made is kept under the run's root, for the next start, which may be on a fresh machine.

It is one file for each kind of device and each device's number in its machine, because compiled code names that number.
torch finds its entries by all that they were made from, so a file of another model or setting is no harm, and no help.
What it holds is code, some of it pickled, and loading runs it. So it is read only when a person has asked for it, and
not when others than this user can write it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import stat
import sys
from pathlib import Path
from typing import Any

import torch

from trainer.config import TrainConfig
from trainer.metrics import Log
from trainer.parallel import Ranks

FORMAT = 1
FOLDER = "compile-cache"
#: Of the first line of a file, which is JSON.
_MAX_HEADER_BYTES = 4096


class CompileCache:
    """One rank's file. Whatever is wrong with it is said, and the run compiles as if there were none."""

    def __init__(self, path: Path, identity: dict[str, Any], log: Log) -> None:
        self._path, self._identity, self._log = path, identity, log
        self._is_writer = False
        self._graphs = count_graphs()
        self._keys: set[str] = set()

    @classmethod
    def open(cls, config: TrainConfig, ranks: Ranks, log: Log) -> CompileCache | None:
        """The cache of a run, with what earlier starts left in it loaded; None without --compile-cache.

        Every rank calls this.
        """
        if not config.compile_cache:
            return None
        path = path_of(config.work, ranks.device)
        cache = cls(path, identity_of(ranks.device), log)
        paths, notes = zip(*ranks.gather((path, cache._load())), strict=True)
        cache._is_writer = paths.index(path) == ranks.rank
        for note in dict.fromkeys(filter(None, notes)):
            log.say(f"note: {note}")
        return cache

    def keep(self) -> None:
        """Write the file, when it lacks something that this run has compiled or taken from elsewhere."""
        graphs = count_graphs()
        if not self._is_writer or graphs == self._graphs:
            return
        self._graphs = graphs
        made = torch.compiler.save_cache_artifacts()
        if made is None:
            return
        content, info = made
        keys = _keys(info)
        if keys <= self._keys:
            return
        try:
            write(self._path, self._identity, content)
            self._keys = keys
        except OSError as error:
            self._log.say(f"note: what was compiled is not kept: {self._path}: {error.strerror or error}")

    def _load(self) -> str:
        """Give torch what the file holds; returns why it was left alone, or nothing."""
        try:
            content = read(self._path, self._identity)
            info = torch.compiler.load_cache_artifacts(content)
            if info is None:
                raise ValueError("torch can't read it")
            self._keys = _keys(info)
        except FileNotFoundError:
            return ""
        except Exception as error:  # unpickling raises nearly anything
            return f"{self._path} is ignored: {error}"
        return ""


def count_graphs() -> dict[str, int]:
    """How many graphs inductor has "compiled" in this process, and how many it had from a cache: "cached"."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported before something is compiled
    counted = dynamo.counters["inductor"] if dynamo else {}
    return {
        "compiled": counted.get("fxgraph_cache_miss", 0) + counted.get("fxgraph_cache_bypass", 0),
        "cached": counted.get("fxgraph_cache_hit", 0),
    }


def path_of(work: Path, device: torch.device) -> Path:
    """The file of all ranks with such a device."""
    identity = identity_of(device)
    name = f"torch {identity['torch']} python {identity['python']} {identity['device']} {device.index or 0}"
    return work / FOLDER / (re.sub(r"[^\w.+]+", "-", name) + ".bin")


def identity_of(device: torch.device) -> dict[str, Any]:
    """What must be the same for a file to be of use."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    python = ".".join(platform.python_version_tuple()[:2])
    return {"format": FORMAT, "torch": torch.__version__, "python": python, "device": name}


def read(path: Path, identity: dict[str, Any]) -> bytes:
    """What `write` was given.

    Raises OSError, and ValueError for a file that is damaged, of other versions, or that others could have written.
    """
    # Without waiting, because a pipe may be in its place.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            raise ValueError("it holds code, and others than this user can write it")
        line, content = file.readline(_MAX_HEADER_BYTES), file.read()
    try:
        header = dict(json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError("it is damaged") from error
    for name, ours in identity.items():
        if header.get(name) != ours:
            raise ValueError(f"its {name} is {header.get(name)!r}, and {ours!r} here")
    if header.get("sha256") != hashlib.sha256(content).hexdigest():
        raise ValueError("it is damaged")
    return content


def write(path: Path, identity: dict[str, Any], content: bytes) -> None:
    """Put a file in the place of the one before, for this user alone. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    header = json.dumps({**identity, "sha256": hashlib.sha256(content).hexdigest()}).encode()
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(header + b"\n" + content)
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def _keys(info: Any) -> set[str]:
    """The names of all that torch says it saved or loaded."""
    return {f"{kind}/{key}" for kind, keys in info.artifacts.items() for key in keys}
