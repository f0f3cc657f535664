"""A folder that is a lock: its owner's identity is the name of a file in it, so a dead owner can be told and replaced.

The folder comes into being by a rename, with that file already inside, so it never lacks one. A taker renames the dead
owner's file to its own name: of several takers only one can succeed, and one that judged an older owner never does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Collection
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, unquote

from ckptool.errors import LockedError
from ckptool.storage.files import os_errors

#: An owner touches its file this often, as long as its process lives.
HEARTBEAT_SECONDS = 20.0

#: Nobody here can see whether another machine's process lives. After this long without a heartbeat or a write it counts
#: as gone; many heartbeats, since clocks differ between machines and network filesystems cache what they tell.
SILENCE_LIMIT_SECONDS = 300.0

_PREFIX = "owner,"
_ATTEMPTS = 5
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Owner:
    """A process, told apart from any other that had or will have its pid; `token` tells its locks apart.

    `started` is in clock ticks since boot (field 22 of /proc/PID/stat, see proc(5)).
    """

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: str
    token: str

    @classmethod
    def this_process(cls) -> Owner:
        boot = _read("/proc/sys/kernel/random/boot_id")[:8]
        namespace = ""
        with contextlib.suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        pid = os.getpid()
        return cls(socket.gethostname(), boot, namespace, pid, _start_time(pid), secrets.token_hex(4))

    @classmethod
    def parse(cls, file_name: str) -> Owner | None:
        """The owner that `file_name` stands for; None for any other name."""
        fields = [unquote(field) for field in file_name.removeprefix(_PREFIX).split(",")]
        if not file_name.startswith(_PREFIX) or len(fields) != 6 or not fields[3].isdigit():
            return None
        return cls(fields[0], fields[1], fields[2], int(fields[3]), fields[4], fields[5])

    @property
    def file_name(self) -> str:
        return _PREFIX + ",".join(quote(str(field), safe="") for field in astuple(self))

    def is_here(self) -> bool:
        """True when this process can see whether that one lives: same host, same pid namespace."""
        here = Owner.this_process()
        return (self.host, self.pid_namespace) == (here.host, here.pid_namespace)

    def is_gone(self, silent_seconds: float) -> bool:
        """True when the process has ended, or can't be seen from here and wrote nothing for `SILENCE_LIMIT_SECONDS`."""
        here = Owner.this_process()
        if self.host == here.host and self.boot != here.boot:
            return True  # the machine was started anew since
        if not self.is_here():
            return silent_seconds > SILENCE_LIMIT_SECONDS
        return _start_time(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Lock:
    """A held lock."""

    folder: Path
    owner: Owner
    stopped: threading.Event = field(default_factory=threading.Event, compare=False)

    @property
    def name(self) -> str:
        """No other lock has it, nor had or will have."""
        return self.owner.file_name

    def __reduce__(self) -> tuple[type[Lock], tuple[Path, Owner]]:
        """Other ranks get the place and the owner; the heartbeat stays here, and ends when the owner's file does."""
        return Lock, (self.folder, self.owner)

    def start_heartbeat(self) -> None:
        """Touch the owner's file every HEARTBEAT_SECONDS until the lock is released or lost, or the process ends."""
        threading.Thread(target=self._beat, name=f"lock {self.folder.name}", daemon=True).start()

    def _beat(self) -> None:
        while not self.stopped.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(self.folder / self.owner.file_name)
            except FileNotFoundError:
                return  # taken over, or its parent was removed
            except OSError:
                continue  # a filesystem that doesn't answer just now

    def check_held(self) -> None:
        """Raise LockedError when another process has taken the lock over."""
        if not (self.folder / self.owner.file_name).exists():
            raise LockedError(
                f"{self.folder} was taken over by {owner_of(self.folder) or 'another process'} while this one wrote",
                hint="run it again once the other one is done",
            )

    def clear(self, keep: Collection[str] = ()) -> None:
        """Remove everything in the folder but its owner's file and the names to keep."""
        for path in self.folder.iterdir():
            if path.name in keep:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != self.owner.file_name:
                path.unlink()

    def release(self) -> None:
        """Remove the folder with all that is in it. A failure to remove leaves litter that blocks nobody."""
        self.stopped.set()
        aside = _aside(self.folder, self.owner)
        with contextlib.suppress(OSError, LockedError):
            self.check_held()
            os.rename(self.folder, aside)
            Lock(aside, self.owner).clear()  # the owner's file goes last: until then all can see whose litter it is
        shutil.rmtree(aside, ignore_errors=True)

    def give_up(self) -> None:
        """Leave the folder as it is, for others to take: its owner then counts as gone, though this process lives."""
        self.stopped.set()
        with contextlib.suppress(OSError):
            os.rename(self.folder / self.owner.file_name, self.folder / replace(self.owner, started="0").file_name)


def acquire(folder: Path, patience_seconds: float = 0.0) -> Lock:
    """Make the lock folder, or take it over from a dead owner: what that one left is then still inside.

    With patience, an owner that can't be seen from here is waited for, until it is done or counts as gone. Raises
    LockedError naming the owner when it is alive, StorageError or AccessError when the disk refuses.
    """
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        owner = owner_of(folder)
        if owner is None or owner.is_here() or owner.is_gone(seconds_silent(folder)):
            break
        time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
    owner = Owner.this_process()
    with os_errors(folder):
        for _ in range(_ATTEMPTS):
            if _create(folder, owner) or _take_over(folder, owner):
                _sweep(folder)
                lock = Lock(folder, owner)
                lock.start_heartbeat()
                return lock
    raise LockedError(f"{folder} is in the way, and nothing says whose it is", hint=f"remove it: rm -r {folder}")


def owner_of(folder: Path) -> Owner | None:
    """Who holds, or held, the lock folder; None when it does not exist or is no lock."""
    with contextlib.suppress(OSError):
        return next((owner for name in sorted(os.listdir(folder)) if (owner := Owner.parse(name))), None)
    return None


def is_stale(folder: Path) -> bool:
    """True when nobody is writing in the lock folder any more. One without owner must be empty, or silent for long."""
    owner, silent_seconds = owner_of(folder), seconds_silent(folder)
    if owner is None:
        return _is_empty(folder) or silent_seconds > SILENCE_LIMIT_SECONDS
    return owner.is_gone(silent_seconds)


def seconds_silent(folder: Path) -> float:
    """How long ago anything below `folder` was last written."""
    newest = 0.0
    for parent, _, files in os.walk(folder):
        for path in (parent, *(os.path.join(parent, file) for file in files)):
            with contextlib.suppress(OSError):
                newest = max(newest, os.lstat(path).st_mtime)
    return time.time() - newest


def _create(folder: Path, owner: Owner) -> bool:
    private = _aside(folder, owner)
    try:
        private.mkdir()
        (private / owner.file_name).touch()
        os.rename(private, folder)
    except OSError as error:
        shutil.rmtree(private, ignore_errors=True)
        # ENOENT: another writer took our folder, still without owner, for litter.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) or (error.errno == errno.ENOENT and folder.parent.exists()):
            return False
        raise
    return True


def _take_over(folder: Path, owner: Owner) -> bool:
    holder = owner_of(folder)
    if holder is None:
        return False
    silent_seconds = seconds_silent(folder)
    try:
        if not holder.is_gone(silent_seconds):
            age_seconds = time.time() - (folder / holder.file_name).stat().st_mtime
            raise LockedError(
                f"{folder} belongs to {holder} since {age_seconds:.0f} s; it last wrote {silent_seconds:.0f} s ago",
                hint=f"wait for it to finish; if it is gone for good: rm -r {folder}",
            )
        os.rename(folder / holder.file_name, folder / owner.file_name)
    except FileNotFoundError:
        return False  # given up, or taken over, this very moment
    os.utime(folder / owner.file_name)
    return True


def _sweep(folder: Path) -> None:
    """Remove what dead owners of this lock have left beside it."""
    for sibling in folder.parent.iterdir():
        if sibling.name.startswith(f"{folder.name}-") and is_stale(sibling):
            shutil.rmtree(sibling, ignore_errors=True)


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _aside(folder: Path, owner: Owner) -> Path:
    return folder.with_name(f"{folder.name}-{owner.token}")


def _start_time(pid: int) -> str:
    """When a living process started; "" for one that has ended."""
    if not os.path.exists("/proc/self/stat"):
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return "unknown"
        return ""
    # The command's name, in parentheses, may hold anything; what follows it are plain fields, the first one the state.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] not in ("Z", "X") else ""


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""
