"""A shim over this process's file operations, which counts them and lets something happen at the n-th.

What Python code does through `os` and `open` is seen; C++ code that opens files by itself is not. Installed only in
forked children, and never removed there.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ckptool.storage import staging

_NAMES = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "symlink", "utime", "truncate")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
RAISED = 3


@dataclass
class Shim:
    """`at` is the operation, counted from 1, before which `fault` strikes; 0 counts only.

    Faults: "kill" ends the process; "tear" does so when half of a write is done; "power" first takes back all that was
    written but not flushed, as a power cut may; an errno's name ("ENOSPC", "EIO") is raised from there on by everything
    that needs space (EIO: by that one operation), "EROFS" and "EACCES" by everything that writes.
    """

    at: int = 0
    fault: str = "kill"
    count: int = 0
    trail: list[str] = field(default_factory=list)
    unflushed: dict[tuple[int, int], int] = field(default_factory=dict)

    def install(self) -> None:
        for name in _NAMES:
            setattr(os, name, self._counted(name, getattr(os, name)))
        self._write, self._pwrite, self._fsync, self._open = os.write, os.pwrite, os.fsync, os.open
        os.write = lambda fd, data: self._writing(fd, data, lambda part: self._write(fd, part))
        os.pwrite = lambda fd, data, offset: self._writing(fd, data, lambda part: self._pwrite(fd, part, offset))
        os.fsync = self._flush
        os.open = self._open_fd
        shim = self

        class CountedFile(io.FileIO):
            def write(self, data: Any) -> int:
                return shim._writing(self.fileno(), data, super().write)

        def counted_open(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return plain_open(file, mode, buffering, *args, **options)
            self.strike("open", str(file))
            raw = CountedFile(file, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw, 1) if "+" in mode else io.BufferedWriter(raw, 1)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

        plain_open = builtins.open
        builtins.open = io.open = counted_open  # type: ignore[assignment]
        shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
        staging.exchange = self._counted("exchange", staging.exchange)  # type: ignore[attr-defined]

    def strike(self, name: str, what: str = "") -> None:
        """Count one operation; if it is the one, or comes after it where that matters, fail."""
        self.count += 1
        self.trail.append(f"{name} {what}")
        if not self.at or self.count < self.at:
            return
        if self.fault in ("kill", "tear"):
            self._die()
        if self.fault == "power":
            for fd in self.unflushed.values():
                os.ftruncate(fd, 0)
            self._die()
        needs_space = name in ("open", "write", "mkdir", "link", "symlink", "fsync")
        removes = name in ("unlink", "remove", "rmdir")
        if (
            (self.fault == "ENOSPC" and needs_space)
            or (self.fault == "EIO" and self.count == self.at)
            or (self.fault in ("EROFS", "EACCES") and not (removes and self.fault == "EACCES"))
        ):
            code = getattr(errno, self.fault)
            raise OSError(code, os.strerror(code), what or None)

    def _die(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.strike(name, str(args[0]))
            return function(*args, **options)

        return counted

    def _writing(self, fd: int, data: Any, write: Callable[[Any], int]) -> int:
        view = memoryview(data).cast("B")
        stat = os.fstat(fd)
        if (stat.st_dev, stat.st_ino) not in self.unflushed:
            self.unflushed[stat.st_dev, stat.st_ino] = os.dup(fd)
        if self.fault == "tear" and self.count + 1 == self.at:
            write(view[: len(view) // 2])
        self.strike("write")
        return write(view)

    def _flush(self, fd: int) -> None:
        self.strike("fsync")
        self._fsync(fd)
        stat = os.fstat(fd)
        kept = self.unflushed.pop((stat.st_dev, stat.st_ino), None)
        if kept is not None:
            os.close(kept)

    def _open_fd(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & _WRITING:
            self.strike("open", str(path))
        return self._open(path, flags, mode, dir_fd=dir_fd)


def run_forked(function: Callable[[], Any], shim: Shim, report: Callable[[Shim, BaseException | None], str]) -> str:
    """Run `function` under the shim in a forked child; what `report` says there of its end, or "killed"."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_child(function, shim, report, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return "killed"
    assert os.WEXITSTATUS(status) == 0, said
    return said


def _run_child(
    function: Callable[[], Any], shim: Shim, report: Callable[[Shim, BaseException | None], str], writing: int
) -> NoReturn:
    code = RAISED
    try:
        import torch

        torch.set_num_threads(1)
        real_write = os.write
        shim.install()
        error: BaseException | None = None
        try:
            function()
        except BaseException as caught:
            error = caught
        shim.at = 0
        real_write(writing, report(shim, error).encode())
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)
