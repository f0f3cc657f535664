"""The stand-in Hub, with a model in three files of weights, and huggingface_hub pointed at it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from ckptool.storage import store
from tests.hub.server import Hub
from tests.tiny_models import llama, save_folder

REPO = "org/tiny-llama"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_folder(llama(), tmp_path_factory.mktemp("hub") / "tiny-llama", max_shard_size="40KB")
    (folder / "pytorch_model.bin").write_bytes(b"legacy weights nobody asked for")
    (folder / "stray.safetensors").write_bytes(b"not in the index")
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Has `org/tiny-llama`. This process speaks to it, anonymously, with an empty cache."""
    with Hub() as server:
        server.add(REPO, folder)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        for name, value in environment(server, tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(store, "_FIRST_WAIT_SECONDS", 0.01)
        yield server
        huggingface_hub.close_session()
        server.shutdown()
        thread.join()


def environment(server: Hub, home: Path) -> dict[str, str]:
    """For a process of its own that speaks to the stand-in."""
    return {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1,localhost",
    }
