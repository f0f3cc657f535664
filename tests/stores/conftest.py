"""A model and a checkpoint of it in stores: in memory, behind HTTP, in S3 as moto's server has it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import ckptool
from ckptool.storage import store
from tests.stores.servers import FolderServer, serving
from tests.tiny_models import llama, save_folder

ACCESS_KEY, SECRET_KEY = "AKIATESTKEY", "verysecretkey0123456789"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_FIRST_WAIT_SECONDS", 0.01)


@pytest.fixture(scope="session")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in three files of weights."""
    return save_folder(llama(), tmp_path_factory.mktemp("hub") / "tiny", "40KB")


@pytest.fixture(scope="session")
def root(hub_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `step-5`, a checkpoint of the model."""
    root = tmp_path_factory.mktemp("root")
    ckptool.import_hf(str(hub_folder), str(root / "step-5"))
    return root


@pytest.fixture
def memory(hub_folder: Path) -> Iterator[fsspec.AbstractFileSystem]:
    """The file system behind memory://, with the model in /bucket/tiny."""
    filesystem = fsspec.filesystem("memory")
    filesystem.put(f"{hub_folder}/", "/bucket/tiny/", recursive=True)
    yield filesystem
    filesystem.rm("/", recursive=True)


@pytest.fixture
def web(root: Path) -> Iterator[FolderServer]:
    """The run root behind HTTP."""
    pytest.importorskip("aiohttp", reason="the HTTP driver needs aiohttp: pip install 'ckptool[http]'")
    with serving(root) as server:
        yield server


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The URL of an S3 server."""
    pytest.importorskip("s3fs", reason="pip install 'ckptool[s3]'")
    moto = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3_environment(s3_endpoint: str) -> dict[str, str]:
    """What ckptool needs to reach it, for processes that were forked before."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_endpoint,
    }


@pytest.fixture
def s3(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    """A client of it, with an empty bucket `bucket`."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    filesystem.mkdir("bucket")
    yield filesystem
    filesystem.rm("bucket", recursive=True)
