"""sftp through a real sshd: everything that a folder can do, several threads at once, lost connections, strangers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import AccessError, DamagedError
from ckptool.ops.copy import copy
from ckptool.ops.ls import ls
from ckptool.ops.prune import prune
from ckptool.storage.place import place
from ckptool.storage.store import Store
from tests.stores.ssh_server import SshServer, find_sshd, ssh_server

pytestmark = pytest.mark.skipif(find_sshd() is None, reason="needs sshd: apt install openssh-server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    pytest.importorskip("paramiko", reason="pip install 'ckptool[sftp]'")
    with ssh_server(tmp_path_factory.mktemp("ssh")) as server:
        yield server


@pytest.fixture(autouse=True)
def keys(server: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the server's user, and no connection that was made with them before."""
    from ckptool.storage.sftp_files import SftpFiles

    monkeypatch.setenv("HOME", str(server.home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    SftpFiles.clear_instance_cache()


def test_there_and_back(server: SshServer, hub_folder: Path, tmp_path: Path) -> None:
    root, back = place(server.url(tmp_path / "runs")), tmp_path / "back"
    ckptool.import_hf(server.url(hub_folder), "m", root=root)
    assert ckptool.verify(server.url(tmp_path / "runs" / "m"), level="content", against=str(hub_folder)).exit_code == 0
    copy("m", "copied", root=root)
    assert [row["name"] for row in ls(root).details["checkpoints"]] == ["copied", "m"]
    ckptool.export("copied", root=root, out=place(server.url(back)))
    assert ckptool.diff(str(back), str(hub_folder)).equal
    hidden = {path.name for path in tmp_path.rglob(".*")}
    assert hidden == {".metadata"}


def test_a_state_is_saved_loaded_and_pruned(server: SshServer, tmp_path: Path) -> None:
    for step in (1, 2):
        provenance = ckptool.Provenance(tool_version=ckptool.__version__, step=step)
        state = {"model": {"w": torch.full((3,), float(step))}, "step": step}
        ckptool.save(state, server.url(tmp_path / f"step-{step}"), provenance=provenance)
    loaded = {"model": {"w": torch.zeros(3)}, "step": 0}
    ckptool.load(loaded, ckptool.resolve("latest", root=place(server.url(tmp_path))))
    assert loaded["step"] == 2 and loaded["model"]["w"].tolist() == [2, 2, 2]
    assert prune(place(server.url(tmp_path)), keep_last=1).details["removed"] == ["step-1"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_threads_read_and_write_at_once_over_one_connection(server: SshServer, tmp_path: Path) -> None:
    content = os.urandom(9 << 20)
    (tmp_path / "data").write_bytes(content)
    store = Store(server.url(tmp_path))

    def move(number: int) -> bool:
        store.put(f"copies/of-{number}/data", tmp_path / "data")
        read = bytearray(6 << 20)
        store.read_into(f"copies/of-{number}/data", number, memoryview(read))
        return read == content[number : number + (6 << 20)]

    before = len(server.connections())
    with ThreadPoolExecutor(6) as workers:
        assert all(workers.map(move, range(6)))
    assert len(server.connections()) == before


def test_a_lost_connection_is_made_anew(server: SshServer, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(os.urandom(5 << 20))
    store = Store(server.url(tmp_path))
    read = bytearray(5 << 20)
    for _ in range(2):
        store.read_into("data", 0, memoryview(read))
        for pid in server.connections():
            os.kill(pid, signal.SIGKILL)
    assert read == (tmp_path / "data").read_bytes()


def test_a_changed_file_is_an_error(server: SshServer, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"first")
    store = Store(server.url(tmp_path))
    assert store.file("data").num_bytes == 5
    (tmp_path / "data").write_bytes(b"other")
    os.utime(tmp_path / "data", (0, 0))
    with pytest.raises(DamagedError, match="changed while it was read"):
        store.read_into("data", 0, memoryview(bytearray(5)))


def test_links_to_files_are_files_and_links_to_folders_are_not_followed(server: SshServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to("absent")
    assert set(Store(server.url(tmp_path)).files) == {"file", "link"}


def test_what_a_killed_upload_has_sent_of_a_file_is_not_that_file(server: SshServer, tmp_path: Path) -> None:
    (tmp_path / "marker").write_bytes(bytes(1 << 20))
    store = Store(server.url(tmp_path / "there"))

    def die(num_bytes: int) -> None:
        raise KeyboardInterrupt

    store._writes.take = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        store.put(".metadata", tmp_path / "marker")
    assert ".metadata" not in store.refresh()
    Store(store.url).put(".metadata", tmp_path / "marker")
    assert store.refresh()[".metadata"].num_bytes == 1 << 20


@pytest.mark.parametrize(
    ("known_hosts", "said"),
    [("", "is not in"), ("[127.0.0.1]:{port} ssh-ed25519 {other}\n", "is not the one in")],
    ids=["unknown", "changed"],
)
def test_a_server_with_another_key_is_refused(
    server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_hosts: str, said: str
) -> None:
    other = (server.home / ".ssh" / "id_ed25519.pub").read_text().split()[1]
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "known_hosts").write_text(known_hosts.format(port=server.port, other=other))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AccessError, match=f"the server's key {said} ~/.ssh/known_hosts"):
        Store(server.url(tmp_path))


def test_without_a_key_access_is_denied_without_naming_the_user(
    server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "known_hosts").write_bytes((server.home / ".ssh" / "known_hosts").read_bytes())
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AccessError, match=r"access denied: sftp://127\.0\.0\.1$"):
        Store(server.url(tmp_path))
