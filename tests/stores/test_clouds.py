"""Azure and Google, as Azurite and gcp-storage-emulator have them: the same journey through each.

npm install -g azurite; pip install 'ckptool[azure,gcs]' gcp-storage-emulator. What isn't installed is skipped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

import ckptool
from ckptool.errors import AccessError, DamagedError, StorageError
from ckptool.ops.copy import copy
from ckptool.ops.data_edit import seek
from ckptool.ops.ls import ls
from ckptool.storage.place import files_below, place
from ckptool.storage.store import Store
from tests.stores.test_runs import save

pytestmark = pytest.mark.slow

#: Azurite's own, which everybody knows.
_AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def azurite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("adlfs", reason="pip install 'ckptool[azure]'")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("needs Azurite: npm install -g azurite")
    port = free_port()
    where = ["--location", str(folder), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    process = subprocess.Popen([program, "--silent", "--disableTelemetry", "--skipApiVersionCheck", *where])
    endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
    account = f"AccountName=devstoreaccount1;AccountKey={_AZURITE_KEY};BlobEndpoint={endpoint};"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{account}")
    try:
        wait_for(port)
        fsspec.filesystem("az").mkdir("bucket")
        yield "az://bucket"
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def google(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("gcsfs", reason="pip install 'ckptool[gcs]'")
    pytest.importorskip("gcp_storage_emulator", reason="pip install gcp-storage-emulator")
    port = free_port()
    where = ["--host=127.0.0.1", f"--port={port}", "--in-memory", "--default-bucket=bucket"]
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", *where]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    try:
        wait_for(port)
        yield "gs://bucket"
    finally:
        process.terminate()
        process.wait()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(params=[azurite, google])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket."""
    with request.param(tmp_path / "server", monkeypatch) as url:
        driver = fsspec.get_filesystem_class(url.partition("://")[0])
        driver.clear_instance_cache()
        yield url
        driver.clear_instance_cache()


def test_there_and_back(bucket: str, hub_folder: Path, tmp_path: Path) -> None:
    for name in files_below(hub_folder):
        Store(f"{bucket}/tiny").put(name, hub_folder / name)
    root = place(f"{bucket}/runs")
    ckptool.import_hf(f"{bucket}/tiny", "m", root=root)
    assert ckptool.verify(f"{bucket}/runs/m", level="content", against=str(hub_folder)).exit_code == 0
    copy("m", "copied", root=root)
    assert [row["name"] for row in ls(root).details["checkpoints"]] == ["copied", "m"]
    ckptool.export("copied", root=root, out=place(f"{bucket}/back"))
    assert ckptool.diff(f"{bucket}/back", str(hub_folder)).equal
    copy(f"{bucket}/runs/m", str(tmp_path / "here"))
    assert ckptool.verify(str(tmp_path / "here"), level="content", against=str(hub_folder)).exit_code == 0


def test_a_url_may_be_a_single_file(bucket: str) -> None:
    Store(bucket).put_bytes("folder/data", b"content")
    read = bytearray(7)
    Store(f"{bucket}/folder/data").read_into("", 0, memoryview(read))
    assert read == b"content"


def test_a_state_is_saved_and_loaded_and_its_position_changed(bucket: str) -> None:
    url = f"{bucket}/run/step-3"
    save(url, 3)
    seek(url, "unit:10")
    assert ckptool.verify(url, level="content").findings == ()
    loaded = {"model": {"w": torch.zeros(3, 4)}}
    ckptool.load(loaded, url)
    assert torch.equal(loaded["model"]["w"], torch.arange(12.0).reshape(3, 4))


def test_the_marker_is_last_and_what_was_sent_is_gone_on_from(
    bucket: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Store.put

    def put(self: Store, name: str, path: Path) -> object:
        if name.endswith(".metadata"):
            raise StorageError("no more")
        return original(self, name, path)

    monkeypatch.setattr(Store, "put", put)
    with pytest.raises(StorageError, match="no more"):
        copy("step-5", f"{bucket}/runs/step-5", root=root)
    assert ckptool.find_latest(f"{bucket}/runs") is None
    monkeypatch.setattr(Store, "put", original)
    assert any("went on from" in note for note in copy("step-5", f"{bucket}/runs/step-5", root=root).notes)
    assert ckptool.verify(f"{bucket}/runs/step-5").exit_code == 0


def test_a_changed_object_is_an_error(bucket: str, tmp_path: Path) -> None:
    source = Store(bucket)
    assert not source.files
    source.put_bytes("data", b"first")
    Store(bucket).put_bytes("data", b"other")
    with pytest.raises(DamagedError, match="changed while it was read"):
        source.read_into("data", 0, memoryview(bytearray(5)))


def test_without_settings_one_line_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs", reason="pip install 'ckptool[azure]'")
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(AccessError, match="do not say enough") as caught:
        Store("az://bucket")
    assert "AZURE_STORAGE_CONNECTION_STRING" in caught.value.hint
