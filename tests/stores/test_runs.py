"""A run with its root in a store: watched, reported on, pruned by its metrics, its data position changed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

import ckptool
from ckptool.cli.main import run
from ckptool.core.data_source import DataSource
from ckptool.core.history import Fed
from ckptool.core.position import DataPosition
from ckptool.errors import NotFoundError, StorageError, UnsupportedError
from ckptool.ops.data_edit import seek
from ckptool.ops.data_import import import_position
from ckptool.ops.data_read import read_position
from ckptool.ops.data_verify import verify_position
from ckptool.ops.prune import prune
from ckptool.ops.report import report
from ckptool.ops.top import Watch, top
from ckptool.storage import replace_files
from ckptool.storage.place import place
from ckptool.storage.store import Store
from tests.stores.servers import FolderServer

S3 = fsspec.AbstractFileSystem


def save(url: str, num_steps: int) -> None:
    begun = DataPosition.begin([DataSource("a", 40, {"tokens": "x"})], seq_len=16, seed=0, global_batch_size=6)
    fed = Fed(0).plus(zip(range(6 * num_steps), begun.units(range(6 * num_steps)), strict=True))
    position = begun.advance(num_steps).with_history([fed])
    state = {
        "model": {"w": torch.arange(12.0).reshape(3, 4)},
        "step": torch.tensor(num_steps),
        "data": {"cursor": torch.tensor(position.cursor()), "record": position.to_json()},
    }
    provenance = ckptool.Provenance(tool_version="0", step=num_steps)
    ckptool.save(state, url, provenance=provenance, position=position)


def metrics(*losses: float) -> bytes:
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1)]
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.fixture
def in_memory() -> Iterator[str]:
    """The URL of `step-3`."""
    save("memory://runs/step-3", 3)
    yield "memory://runs/step-3"
    fsspec.filesystem("memory").rm("/", recursive=True)


def test_a_run_is_watched_with_its_metrics_in_the_store(s3: S3) -> None:
    root = place("s3://bucket/run")
    s3.pipe("bucket/run/metrics.jsonl", metrics(4.0, 2.0))
    watch = Watch(root, total_steps=10)
    assert watch.look().details["checkpoint"] is None
    save("s3://bucket/run/step-3", 3)
    s3.pipe("bucket/run/metrics.jsonl", metrics(4.0, 2.0, 1.0))
    facts = watch.look().details
    assert (facts["step"], facts["losses"], facts["checkpoint"]["name"]) == (3, [4.0, 2.0, 1.0], "step-3")


def test_a_run_is_watched_with_its_metrics_in_the_work_folder(in_memory: str, tmp_path: Path) -> None:
    root = place("memory://runs")
    with pytest.raises(NotFoundError, match="no run is going on there") as caught:
        top(root)
    assert "--work-dir" in caught.value.hint
    (tmp_path / "metrics.jsonl").write_bytes(metrics(4.0, 2.0, 1.0))
    facts = top(root, work_dir=tmp_path).details
    assert (facts["step"], facts["checkpoint"]["name"]) == (3, "step-3")


def test_a_page_about_a_run_in_a_store(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bokeh", reason="pip install 'ckptool[report]'")
    for step in (3, 4):
        save(f"s3://bucket/run/step-{step}", step)
    (tmp_path / "metrics.jsonl").write_bytes(metrics(4.0, 2.0, 1.0, 0.5))
    options = ["--work-dir", str(tmp_path), "--level", "content", "--json"]
    for name in ("s3://bucket/run", "s3://bucket/run/step-4"):
        against = ["--against", "s3://bucket/run/step-3", "--out", str(tmp_path / f"{len(name)}.html")]
        assert run(["report", name, *options, *against]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["checkpoint"], facts["run"]) == ("s3://bucket/run/step-4", "s3://bucket/run")
        assert (facts["num_steps"], facts["num_findings"]) == (4, 0)


def test_a_page_about_a_model_in_a_store(memory: S3, tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="pip install 'ckptool[report]'")
    facts = report("memory://bucket/tiny", out=tmp_path / "page.html").details
    assert facts["run"] is None and facts["num_tensors"] > 0


def test_the_best_stay_by_the_metrics_of_the_work_folder(in_memory: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(f"memory://best/step-{step}", step)
    root = place("memory://best")
    with pytest.raises(NotFoundError):
        prune(root, keep_best=("loss", "min", 1))
    (tmp_path / "metrics.jsonl").write_bytes(metrics(1.0, 4.0, 2.0))
    assert prune(root, keep_best=("loss", "min", 1), work_dir=tmp_path).details["removed"] == ["step-2"]


def test_a_data_position_is_changed_in_s3_and_nothing_else(s3: S3) -> None:
    url = "s3://bucket/run/step-3"
    save(url, 3)
    before = s3.find("bucket/run", detail=True)
    for to in ("unit:10", "+3", "-1"):
        seek(url, to, reason="a test")
        assert ckptool.verify(url, level="content").findings == ()
        assert verify_position(url, replay=True).findings == ()
    s3.invalidate_cache()
    after = s3.find("bucket/run", detail=True)
    (added,) = set(after) - set(before)
    assert added.startswith("bucket/run/step-3/__data_edit") and set(before) <= set(after)
    shards = [path for path in before if "/__0_" in path]
    assert shards and all(after[path]["ETag"] == before[path]["ETag"] for path in shards)
    assert [record.action for record in read_position(url).position.edits] == ["seek"] * 3


class Killed(BaseException):
    pass


@pytest.mark.parametrize("num_calls", range(13))
def test_a_change_that_is_killed_is_whole_or_not_there(
    in_memory: str, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    """Killed at each of its calls to the store; the next change finds the old position or the new one, and is good."""
    calls = 0

    def dying(name: str) -> None:
        original = getattr(Store, name)

        def call(self: Store, *args: object) -> object:
            nonlocal calls
            calls += 1
            if calls > num_calls:
                raise Killed
            return original(self, *args)

        monkeypatch.setattr(Store, name, call)

    old = read_position(in_memory).position.consumed
    with monkeypatch.context():
        for name in ("put", "remove"):
            dying(name)
        try:
            seek(in_memory, "unit:10")
        except Killed:
            assert calls == num_calls + 1
    monkeypatch.undo()
    place_now = read_position(in_memory).position.segment.phase
    seek(in_memory, "+2")
    position = read_position(in_memory).position
    assert position.consumed == old and len(position.edits) in (1, 2)
    assert len(position.edits) == 2 or place_now == 0
    assert ckptool.verify(in_memory, level="content").findings == ()
    assert not any(name.startswith(replace_files.CHANGE_FOLDER) for name in Store(in_memory).files)


def test_a_checkpoint_that_somebody_replaced_meanwhile_is_left_alone(
    in_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Store.refresh

    def refresh(self: Store) -> object:
        time.sleep(0.01)
        fsspec.filesystem("memory").pipe("/runs/step-3/.metadata", b"another")
        return original(self)

    monkeypatch.setattr(Store, "refresh", refresh)
    with pytest.raises(StorageError, match="does something else write"):
        seek(in_memory, "unit:10")
    assert fsspec.filesystem("memory").cat("/runs/step-3/.metadata") == b"another"


def test_what_can_only_be_read_is_not_changed(web: FolderServer) -> None:
    with pytest.raises(UnsupportedError):
        import_position(f"{web.url}/step-5", "torchtitan")
