"""`--local-cache` with hf-xet: fetched through it where the Hub offers that, else over HTTP."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import ckptool
from ckptool.errors import StorageError
from tests.hub import server as stand_in
from tests.hub.conftest import REPO
from tests.hub.server import Hub

pytest.importorskip("hf_xet", reason="pip install hf-xet")


@pytest.fixture
def with_xet(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The stand-in for a client that may use hf-xet, which it doesn't offer yet."""
    monkeypatch.delenv("HF_HUB_DISABLE_XET")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    return hub


def offer_xet(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights get a hash of Xet's, and there is a store of chunks that has them under it."""
    original = stand_in._Handler._send

    def send(
        self: Any, status: int, body: bytes, headers: dict[str, str] | None = None, sent: int | None = None
    ) -> None:
        headers = dict(headers or {})
        if "X-Linked-Etag" in headers:
            headers["X-Xet-Hash"] = headers["X-Linked-Etag"].strip('"')
            headers["X-Xet-Refresh-Route"] = f"{hub.url}/xet-token"
        original(self, status, body, headers, sent)

    def token(self: Any, body: bytes, fault: str) -> None:
        expires = str(int(time.time()) + 3600)
        self._send(
            200, b"{}", {"X-Xet-Cas-Url": hub.url, "X-Xet-Access-Token": "token", "X-Xet-Token-Expiration": expires}
        )

    def reconstruction(self: Any, body: bytes, fault: str, file_hash: str) -> None:
        size = len(hub.lfs[file_hash])
        chunks = {"start": 0, "end": 1}
        place = {"range": chunks, "url": f"{hub.cdn}/xorb/{file_hash}", "url_range": {"start": 0, "end": size + 7}}
        term = {"hash": file_hash, "unpacked_length": size, "range": chunks}
        self._json({"offset_into_first_range": 0, "terms": [term], "fetch_info": {file_hash: [place]}})

    def xorb(self: Any, body: bytes, fault: str, file_hash: str) -> None:
        content = hub.lfs[file_hash]
        size = len(content).to_bytes(3, "little")
        self._ranges(b"\0" + size + b"\0" + size + content, {}, fault)  # one chunk, not compressed

    routes = [
        ("/xet-token", token),
        ("/v1/reconstructions/([0-9a-f]+)", reconstruction),
        ("/xorb/([0-9a-f]+)", xorb),
    ]
    monkeypatch.setattr(stand_in._Handler, "_send", send)
    monkeypatch.setattr(stand_in, "_ROUTES", [*routes, *stand_in._ROUTES])


def test_a_hub_that_does_not_offer_it_is_read_over_http(with_xet: Hub, folder: Path, tmp_path: Path) -> None:
    ckptool.import_hf(REPO, "m", root=tmp_path, local_cache=True)
    assert ckptool.verify(str(tmp_path / "m"), against=str(folder)).exit_code == 0
    assert with_xet.count("GET", "/cdn/") >= 3


def test_weights_come_through_it(with_xet: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_xet(with_xet, monkeypatch)
    ckptool.import_hf(REPO, "m", root=tmp_path, local_cache=True)
    assert ckptool.verify(str(tmp_path / "m"), against=str(folder)).exit_code == 0
    assert with_xet.count("GET", "/xorb/") >= 3 and with_xet.count("GET", "/cdn/") == 0
    before = len(with_xet.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ckptool.import_hf(REPO, "again", root=tmp_path)
    assert ckptool.diff(str(tmp_path / "again"), str(tmp_path / "m")).equal and len(with_xet.requests) == before


def test_without_the_cache_ranges_are_read_over_http_all_the_same(
    with_xet: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_xet(with_xet, monkeypatch)
    ckptool.import_hf(REPO, "m", root=tmp_path)
    assert ckptool.verify(str(tmp_path / "m"), against=str(folder)).exit_code == 0
    assert with_xet.count("GET", "/xorb/") == 0


def test_a_store_of_chunks_that_fails_ends_in_one_line(
    with_xet: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_xet(with_xet, monkeypatch)
    with_xet.fault = lambda method, path: "403" if path.startswith("/v1/") else ""
    with pytest.raises(StorageError) as caught:
        ckptool.import_hf(REPO, "m", root=tmp_path, local_cache=True)
    assert "\n" not in str(caught.value) and not (tmp_path / "m").exists()
