"""fsspec's sftp, made fit for several threads, for lost connections, and for servers that may not be who they say.

One sftp channel answers one thread at a time, and asks for 32 KiB a round trip when it is read like a file. Here each
call has a channel of the one connection for itself, and asks for all it wants at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

from ckptool.errors import AccessError

#: sshd allows ten channels a connection unless told otherwise (MaxSessions).
_NUM_CHANNELS = 8
_SILENCE_SECONDS = 20.0
_ANSWER_BYTES = 32 << 10
_POLICIES = {
    "reject": paramiko.RejectPolicy,
    "warning": paramiko.WarningPolicy,
    "auto_add": paramiko.AutoAddPolicy,
}

_KEYS = "the keys of ssh-agent and ~/.ssh are tried; ~/.ssh/config is not read"

#: What a server answers, by a channel that is as good as before.
_ANSWERS = (FileNotFoundError, PermissionError)


class SftpFiles(SFTPFileSystem):
    """The methods that a Store calls, each safe to call from any thread, also from a forked process."""

    def __init__(self, host: str, host_key_policy: str = "reject", **ssh_kwargs: Any) -> None:
        """`host_key_policy` is for servers whose key ~/.ssh/known_hosts doesn't have. Raises AccessError."""
        if not self._cached:
            self._policy = _POLICIES[host_key_policy]
        super().__init__(host, **ssh_kwargs)

    def _connect(self) -> None:
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(_NUM_CHANNELS)
        self._dial()

    def _dial(self) -> None:
        self._pid = os.getpid()
        self._idle: list[paramiko.SFTPClient] = []
        self.client = paramiko.SSHClient()
        self.client.load_system_host_keys()
        self.client.set_missing_host_key_policy(self._policy())
        limits = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout"), _SILENCE_SECONDS)
        shown = f"sftp://{self.host}"
        try:
            self.client.connect(self.host, **{**limits, **self.ssh_kwargs})
        except paramiko.AuthenticationException:
            raise AccessError(f"access denied: {shown}", hint=_KEYS) from None
        except paramiko.BadHostKeyException:
            hint = "somebody may be in between; if the server got a new key: ssh-keygen -R, then ssh to it once"
            raise AccessError(f"{shown}: the server's key is not the one in ~/.ssh/known_hosts", hint=hint) from None
        except paramiko.SSHException as error:
            if "known_hosts" in str(error):
                hint = "ssh to it once, and confirm its key"
                raise AccessError(f"{shown}: the server's key is not in ~/.ssh/known_hosts", hint=hint) from None
            if "No authentication methods" in str(error):
                raise AccessError(f"access denied: {shown}", hint=_KEYS) from None
            raise
        if (transport := self.client.get_transport()) is not None:
            transport.channel_timeout = _SILENCE_SECONDS  # an hour, else

    @property
    def ftp(self) -> paramiko.SFTPClient:
        """The channel of this thread's call."""
        return self._mine.ftp

    @contextlib.contextmanager
    def _channel(self) -> Iterator[paramiko.SFTPClient]:
        """A channel that no other thread has meanwhile; after an error that is no answer it is not used again."""
        if getattr(self._mine, "ftp", None) is not None:
            yield self.ftp
            return
        with self._slots:
            channel = self._mine.ftp = self._take()
            is_good = False
            try:
                yield channel
                is_good = True
            except _ANSWERS:
                is_good = True
                raise
            finally:
                self._mine.ftp = None
                if is_good:
                    self._idle.append(channel)
                else:
                    channel.close()

    def _take(self) -> paramiko.SFTPClient:
        with self._lock:
            transport = self.client.get_transport()
            if self._pid != os.getpid() or transport is None or not transport.is_active():
                self._dial()
            if self._idle:
                return self._idle.pop()
            channel = self.client.open_sftp()
        channel.get_channel().settimeout(_SILENCE_SECONDS)
        return channel

    def find(self, path: str, detail: bool = True, **kwargs: Any) -> dict[str, Any]:
        """Every file below `path` with what is known of it. Links to files are files; links to folders are left out."""
        path = self._strip_protocol(path)
        top = self.info(path)
        if top["type"] == "file":
            return {path: top}
        found: dict[str, Any] = {}
        folders = [path]
        with ThreadPoolExecutor(_NUM_CHANNELS, "sftp-list") as workers:
            while folders:
                entries = [entry for listed in workers.map(self._listed, folders) for entry in listed]
                folders = [entry["name"] for entry in entries if entry["type"] == "directory"]
                found.update((entry["name"], entry) for entry in entries if entry["type"] == "file")
        return found

    def _listed(self, folder: str) -> list[dict[str, Any]]:
        with self._channel() as channel:
            try:
                entries = [self._decode_stat(stat, folder) for stat in channel.listdir_attr(folder)]
            except FileNotFoundError:
                return []  # removed since its parent was listed
            for entry in entries:
                if entry["type"] == "link":
                    with contextlib.suppress(FileNotFoundError):
                        target = self.info(entry["name"])
                        entry.update(target if target["type"] == "file" else {})
        return entries

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        with self._channel():
            return super().info(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        with self._channel() as channel, channel.open(self._strip_protocol(path), "rb") as file:
            first = start or 0
            last = file.stat().st_size or 0 if end is None else end
            # In pieces of what one answer brings: of longer ones paramiko copies all it has with each answer.
            return b"".join(
                file.readv([(at, min(_ANSWER_BYTES, last - at)) for at in range(first, last, _ANSWER_BYTES)])
            )

    def put_file(
        self, lpath: str, rpath: str, callback: Any = None, sent: Callable[[int], None] | None = None, **kwargs: Any
    ) -> None:
        """Upload under a hidden name, then rename: a file is there whole or not at all. `sent` hears of each piece."""
        folder, _, name = rpath.rpartition("/")
        temporary = f"{folder}/.{name}.ckptool-part"
        so_far = 0

        def tell(num_bytes: int, _total: int) -> None:
            nonlocal so_far
            if sent is not None:
                sent(num_bytes - so_far)
            so_far = num_bytes

        with self._channel() as channel:
            self.makedirs(folder, exist_ok=True)
            channel.put(lpath, temporary, callback=tell)
            self.mv(temporary, rpath)

    def mv(self, old: str, new: str, **kwargs: Any) -> None:
        with self._channel() as channel:
            try:
                channel.posix_rename(old, new)
            except OSError:  # a server without this extension of OpenSSH's
                with contextlib.suppress(FileNotFoundError):
                    channel.remove(new)
                channel.rename(old, new)

    def rm_file(self, path: str) -> None:
        with self._channel() as channel:
            channel.remove(self._strip_protocol(path))

    def remove_if_empty(self, folder: str) -> bool:
        """Whether it was: a folder with something in it stays."""
        with self._channel() as channel:
            try:
                channel.rmdir(folder)
            except OSError:
                return False
        return True

    def makedirs(self, path: str, exist_ok: bool = False, mode: int = 0o777) -> None:
        with self._channel() as channel:
            if not path or self.isdir(path):
                return
            self.makedirs(path.rpartition("/")[0])
            try:
                channel.mkdir(path, mode)
            except OSError:
                if not self.isdir(path):  # or another thread was first
                    raise


def open_sftp(url: str) -> tuple[SftpFiles, str]:
    """The server of an sftp:// URL, logged in, and the path there. Raises AccessError."""
    return SftpFiles(**SftpFiles._get_kwargs_from_urls(url)), SftpFiles._strip_protocol(url)
