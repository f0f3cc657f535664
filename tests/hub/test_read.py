"""Models read straight from the Hub, at one commit, in ranges that are held against what the plan saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

import ckptool
from ckptool.errors import AccessError, DamagedError, NotFoundError, StorageError, UnsupportedError, UsageError
from ckptool.formats import dcp_sink
from ckptool.hub import locate
from ckptool.storage import hub_store, store
from ckptool.storage.place import place
from ckptool.storage.store import Store
from ckptool.storage.store_path import StorePath
from tests.hub.conftest import REPO
from tests.hub.server import SIGNATURE, TOKEN, Hub


def stored(path: Path) -> dict[str, object]:
    return dict(json.loads((path / "ckptool.json").read_text())["source"])


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "hf").rglob("snapshots/*/*"))


def store_of(src: str) -> Store:
    found = locate(src, None).path
    assert isinstance(found, StorePath)
    return found.store


def test_a_model_is_read_without_a_local_copy(hub: Hub, folder: Path, tmp_path: Path) -> None:
    ckptool.import_hf(REPO, root=tmp_path)
    assert ckptool.diff(str(tmp_path / "tiny-llama"), str(folder)).equal
    assert (tmp_path / "tiny-llama" / "hf" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    commit = hub.repos[REPO].branches["main"]
    assert stored(tmp_path / "tiny-llama") == {"repo": REPO, "commit": commit, "dtype": "bfloat16"}
    assert cached(tmp_path) == []
    asked = [path for method, path in hub.requests if "/resolve/" in path]
    assert all(f"/resolve/{commit}/" in path for path in asked)
    assert not any("pytorch_model.bin" in path or "stray" in path for path in asked)


def test_a_url_and_a_revision_say_the_same(hub: Hub, folder: Path, tmp_path: Path) -> None:
    commit = hub.repos[REPO].branches["main"]
    hub.add(REPO, folder, branch="feature/x")
    for name, src, revision in (
        ("a", f"hf://{REPO}", None),
        ("b", f"hf://{REPO}@feature%2Fx", None),
        ("c", REPO, "feature/x"),
        ("d", f"hf://{REPO}@{commit}", None),
    ):
        found = locate(src, revision)
        wanted = commit if name in "ad" else hub.repos[REPO].branches["feature/x"]
        assert (found.default_name, found.origin) == ("tiny-llama", {"repo": REPO, "commit": wanted})
    with pytest.raises(UsageError, match="and so does --revision"):
        locate(f"hf://{REPO}@main", "main")


def test_paths_inside_and_single_files(hub: Hub, folder: Path, tmp_path: Path) -> None:
    assert (place(f"hf://{REPO}/assets") / "notes.bin").stat().st_size == 256
    found = locate(f"hf://{REPO}/model-00001-of-00003.safetensors", None)
    assert found.origin["path"] == "model-00001-of-00003.safetensors"
    assert found.path.is_file()
    assert str(found.path.parent) == f"hf://{REPO}"


def test_the_cache_is_taken_where_it_has_the_commit(hub: Hub, folder: Path, tmp_path: Path) -> None:
    first = locate(REPO, None, local_cache=True)
    assert isinstance(first.path, Path) and "model-00003-of-00003.safetensors" in cached(tmp_path)
    hub.requests.clear()
    assert locate(REPO, None) == first
    assert not hub.count("GET", "/resolve/")
    hub.add(REPO, folder)
    assert isinstance(locate(REPO, None).path, StorePath)


def test_offline_the_cache_is_all_there_is(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locate(REPO, None, local_cache=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    for src in (REPO, f"hf://{REPO}"):
        assert isinstance(locate(src, None).path, Path)
    with pytest.raises(NotFoundError, match="not in the local Hub cache") as raised:
        locate("org/never-seen", None)
    assert "--local-cache" in raised.value.hint
    assert hub.requests == []


@pytest.mark.parametrize("fault", ["429 0", "503", "cut"])
@pytest.mark.parametrize("part", ["/cdn/", "/resolve/", "/api/models/"])
def test_answers_that_fail_are_asked_for_again(hub: Hub, folder: Path, fault: str, part: str) -> None:
    hub.times(3, "GET", part, fault)
    read = bytearray(3000)
    store_of(REPO).read_into("model-00001-of-00003.safetensors", 100, memoryview(read))
    assert read == (folder / "model-00001-of-00003.safetensors").read_bytes()[100:3100]


def test_a_hub_that_only_fails_ends_in_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.fault = lambda method, path: "503" if "/cdn/" in path else ""
    with pytest.raises(StorageError, match=r"failed 6 times \(HTTP 503\)"):
        ckptool.import_hf(REPO, root=tmp_path)
    assert not (tmp_path / "tiny-llama").exists()


def test_a_hub_that_fails_may_have_been_asked_for_a_mistyped_path(hub: Hub) -> None:
    hub.fault = lambda method, path: "503"
    for src, is_named in (("nosuch", True), ("org/nosuch", True), ("hf://org/nosuch", False)):
        with pytest.raises(StorageError, match="failed 6 times") as raised:
            locate(src, None)
        assert (f"there is no file or folder {src} here" in raised.value.hint) == is_named
        assert raised.value.hint.endswith("try again later")


@pytest.mark.parametrize("answer", ["429 7", "429 t7"])
def test_a_server_s_wait_is_kept_to(hub: Hub, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(store.time, "sleep", waits.append)
    hub.times(2, "GET", "/cdn/", answer)
    store_of(REPO).read_into("model-00001-of-00003.safetensors", 0, memoryview(bytearray(8)))
    assert [7 <= wait < 8 for wait in waits] == [True, True]


def test_a_signed_link_is_used_until_it_runs_out(hub: Hub, folder: Path) -> None:
    file = "model-00001-of-00003.safetensors"
    source = store_of(REPO)
    hub.requests.clear()
    for start in range(5):
        source.read_into(file, start * 10, memoryview(bytearray(10)))
    assert (hub.count("GET", "/resolve/"), hub.count("GET", "/cdn/")) == (1, 5)
    hub.times(1, "GET", "/cdn/", "403")
    read = bytearray(10)
    source.read_into(file, 0, memoryview(read))
    assert read == (folder / file).read_bytes()[:10]
    assert hub.count("GET", "/resolve/") == 2


def test_an_answer_with_the_whole_file_is_cut(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fault = lambda method, path: "whole"
    source = store_of(REPO)
    read = bytearray(20)
    source.read_into("config.json", 10, memoryview(read))
    assert read == (folder / "config.json").read_bytes()[10:30]
    monkeypatch.setattr(hub_store, "_LONGEST_WHOLE_BYTES", 100)
    with pytest.raises(UnsupportedError, match="does not answer with the range"):
        source.read_into("config.json", 10, memoryview(read))


def test_the_branch_may_move_on_meanwhile(hub: Hub, folder: Path, tmp_path: Path) -> None:
    source = store_of(REPO)
    before = source.file("config.json")
    (tmp_path / "config.json").write_text("{}")
    hub.add(REPO, tmp_path)
    read = bytearray(before.num_bytes)
    source.read_into("config.json", 0, memoryview(read))
    assert read == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("file", ["config.json", "model-00001-of-00003.safetensors"])
def test_other_content_is_an_error(hub: Hub, file: str) -> None:
    source = store_of(REPO)
    source.file(file)
    hub.fault = lambda method, path: "other" if "/resolve/" in path else ""
    with pytest.raises(DamagedError, match="was changed while it was read"):
        source.read_into(file, 0, memoryview(bytearray(100)))


def test_other_content_behind_a_known_link_is_not_taken(hub: Hub, folder: Path) -> None:
    file = "model-00001-of-00003.safetensors"
    source = store_of(REPO)
    source.read_into(file, 0, memoryview(bytearray(10)))
    hub.times(1, "GET", "/cdn/", "other")
    read = bytearray(10)
    source.read_into(file, 20, memoryview(read))
    assert read == (folder / file).read_bytes()[20:30]


def test_a_commit_that_goes_away_is_an_error(hub: Hub) -> None:
    source = store_of(REPO)
    source.file("config.json")
    hub.repos[REPO].commits.clear()
    with pytest.raises(DamagedError, match="no longer there at commit"):
        source.read_into("config.json", 0, memoryview(bytearray(100)))


def test_an_interrupted_import_goes_on(hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_sink, "_MIN_FILE_BYTES", 1)
    last = hub.repos[REPO].files()["model-00003-of-00003.safetensors"].sha256  # type: ignore[index]
    hub.fault = lambda method, path: "503" if last in path and hub.count("GET", last) > 2 else ""
    with pytest.raises(StorageError) as raised:
        ckptool.import_hf(REPO, root=tmp_path, num_workers=1)
    assert "goes on from where this one stopped" in raised.value.hint
    hub.fault = lambda method, path: ""
    result = ckptool.import_hf(REPO, root=tmp_path, num_workers=1)
    assert any("went on from an interrupted attempt" in note for note in result.notes)
    assert ckptool.diff(str(tmp_path / "tiny-llama"), str(folder)).equal


@pytest.mark.parametrize(
    ("src", "revision", "kind", "says"),
    [
        ("org/gated", None, AccessError, "is gated"),
        ("org/private", None, NotFoundError, "neither a local path nor a Hub repository"),
        ("org/nothing-here", None, NotFoundError, "neither a local path nor a Hub repository"),
        (f"hf://{REPO}/no/such", None, NotFoundError, "no such file or folder"),
        (REPO, "no-such", NotFoundError, "no revision 'no-such'"),
    ],
)
def test_each_way_to_miss_a_model_is_one_line(
    hub: Hub, folder: Path, tmp_path: Path, src: str, revision: str | None, kind: type[Exception], says: str
) -> None:
    hub.add("org/gated", folder, gated=True)
    hub.add("org/private", folder, private=True)
    with pytest.raises(kind, match=says) as raised:
        ckptool.import_hf(src, "x", root=tmp_path, revision=revision)
    assert "\n" not in str(raised.value) and "http" not in str(raised.value)


def test_a_token_opens_what_is_private_and_goes_nowhere_else(
    hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/private", folder, private=True, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    ckptool.import_hf("org/private", root=tmp_path)
    assert hub.count("GET", "/cdn/") > 2 and hub.tokens_elsewhere == []
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    hub.fault = lambda method, path: "401"
    with pytest.raises(AccessError, match="does not accept your token"):
        locate("org/private", None)


def test_nothing_is_written_to_a_repository_by_url(hub: Hub, folder: Path, tmp_path: Path) -> None:
    ckptool.import_hf(str(folder), "m", root=tmp_path)
    with pytest.raises(UnsupportedError, match="only read here"):
        ckptool.export("m", root=tmp_path, out=place(f"hf://{REPO}"))


def test_a_link_is_never_shown(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.fault = lambda method, path: "503" if "/cdn/" in path else ""
    with pytest.raises(StorageError) as raised:
        ckptool.import_hf(REPO, root=tmp_path)
    assert SIGNATURE not in str(raised.value) + raised.value.hint + caplog.text
