"""A real sshd on loopback, with keys of its own: for one user, on a free port, serving sftp only."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Where Debian has it; it is on no ordinary user's PATH.
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


@dataclass(frozen=True)
class SshServer:
    """`home` holds a .ssh folder with a key that the server takes, and a known_hosts with the server's own."""

    port: int
    home: Path
    process: subprocess.Popen[bytes]

    def url(self, folder: Path) -> str:
        return f"sftp://{getpass.getuser()}@127.0.0.1:{self.port}{folder}"

    def connections(self) -> list[int]:
        """The processes that serve one connection each."""
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]


def find_sshd() -> str | None:
    return shutil.which("sshd", path=_PATH)


@contextlib.contextmanager
def ssh_server(folder: Path) -> Iterator[SshServer]:
    """Raises TimeoutError with what sshd said when it doesn't begin to listen."""
    program = find_sshd()
    assert program is not None
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    for key in (folder / "host_key", home / ".ssh" / "id_ed25519"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    shutil.copy(home / ".ssh" / "id_ed25519.pub", folder / "authorized_keys")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host_key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}\n")
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "authorized_keys",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "Subsystem": "sftp internal-sftp",
    }
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it locks itself up before a login
    log = folder / "log"
    process = subprocess.Popen([program, "-D", "-f", str(folder / "sshd_config"), "-E", str(log)])
    try:
        _wait_until_listening(process, port, log)
        yield SshServer(port, home, process)
    finally:
        process.terminate()
        process.wait()


def _wait_until_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"sshd doesn't listen: {log.read_text() if log.exists() else 'it said nothing'}")
