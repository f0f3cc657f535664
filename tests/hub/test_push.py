"""Exports that go to the Hub: one commit, a card that says where the weights come from, nothing overwritten unasked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

import ckptool
from ckptool.cli.main import run
from ckptool.errors import AccessError, CkptoolError, StorageError, TargetExistsError, UsageError
from ckptool.ops.model_card import Origin, make_card
from ckptool.ops.push import PushTarget
from tests.hub.conftest import REPO
from tests.hub.server import SIGNATURE, TOKEN, File, Hub

MINE = "me/mine"


@pytest.fixture(scope="session")
def root(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `step-4`: a checkpoint trained on from org/base, whose card came with it."""
    root = tmp_path_factory.mktemp("root")
    side = Path(shutil.copytree(folder, root / "side", ignore=shutil.ignore_patterns("*.safetensors*", "*.bin")))
    side.joinpath("README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: en\nmodel-index: []\nbase_model: older/one\n---\n\n# Base\n\nOnce.\n"
    )
    ckptool.import_hf(str(folder), "base", root=root)
    manifest = ckptool.open_checkpoint(root / "base")
    state = {"model": load_all(root / "base"), "step": 4}
    provenance = ckptool.Provenance(
        "0", step=4, source={"repo": "org/base", "commit": "c0ffee", "path": "/home/secret"}, ties=dict(manifest.ties)
    )
    ckptool.save(state, root / "step-4", provenance=provenance, side_folder=side)
    return root


def load_all(path: Path) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    entries = ckptool.open_checkpoint(path).tensors
    state = {name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in entries.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


@pytest.fixture
def mine(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def export(root: Path, out: Path, repo: str = MINE, **options: Any) -> dict[str, Any]:
    names = ("branch", "private", "message")
    target = PushTarget(repo, **{name: options.pop(name) for name in names if name in options})
    result = ckptool.export("step-4", root=root, out=out, push=target, max_shard_bytes=40_000, **options)
    return dict(result.details["push"])


def test_a_checkpoint_becomes_a_repository_in_one_commit(mine: Hub, root: Path, tmp_path: Path) -> None:
    pushed = export(root, tmp_path / "out", message="Ours")
    repo = mine.repos[MINE]
    assert repo.titles == ["initial commit", "Ours"] and pushed["commit"] == repo.branches["main"]
    files = repo.files() or {}
    for path in (tmp_path / "out").rglob("*"):
        name = path.relative_to(tmp_path / "out").as_posix()
        if path.is_file() and name != "README.md":
            assert files[name].content == path.read_bytes()
    assert ckptool.diff(str(tmp_path / "out"), f"hf://{MINE}").equal


def test_the_card_says_where_the_weights_come_from(mine: Hub, root: Path, tmp_path: Path) -> None:
    export(root, tmp_path / "out")
    text = (mine.repos[MINE].files() or {})["README.md"].content.decode()
    card = ModelCard(text)
    assert card.data.to_dict() == {
        **{"license": "apache-2.0", "language": "en", "library_name": "transformers"},
        **{"base_model": "org/base", "base_model_relation": "finetune"},
    }
    for words in ("[org/base]", "`c0ffee`", "| optimizer steps | 4 |", f"ckptool {ckptool.__version__}", "`step-4`"):
        assert words in text
    assert text.index("Where these weights come from") < text.index("The base model's card") < text.index("Once.")
    assert "secret" not in text


def test_a_card_that_people_wrote_is_kept_but_for_our_section(tmp_path: Path) -> None:
    written = make_card(MINE, tmp_path, Origin("step-4", "org/base", step=4), None)
    edited = written.replace("# mine", "# My model\n\nBy hand.").replace("library_name", "license: mit\nlibrary_name")
    again = make_card(MINE, tmp_path, Origin("step-9", "org/base", step=9), edited)
    assert "By hand." in again and "`step-9`" in again and "`step-4`" not in again
    assert ModelCard(again).data.to_dict()["license"] == "mit"
    assert make_card(MINE, tmp_path, Origin("step-9", "org/base", step=9), again) == again
    assert make_card(MINE, tmp_path, None, edited) == edited
    assert "Where these" in make_card(MINE, tmp_path, Origin("x"), "---\n[broken\n---\nText\n")


def test_weights_that_are_there_are_not_overwritten_unasked(mine: Hub, root: Path, tmp_path: Path) -> None:
    before = mine.repos[REPO].branches["main"]
    with pytest.raises(TargetExistsError, match="already has weights on its branch main"):
        export(root, tmp_path / "out", REPO)
    assert not (tmp_path / "out").exists()
    export(root, tmp_path / "branch", REPO, branch="trained")
    assert mine.repos[REPO].branches["main"] == before
    mine.repos[REPO].files("main")["old-00001.safetensors"] = File(b"stale", True)  # type: ignore[index]
    export(root, tmp_path / "over", REPO, overwrite=True)
    after = mine.repos[REPO].files() or {}
    assert "old-00001.safetensors" not in after and "pytorch_model.bin" not in after and "config.json" in after
    assert ckptool.diff(str(tmp_path / "over"), f"hf://{REPO}").equal


def test_an_export_that_is_there_already_is_pushed_by_another_command(mine: Hub, root: Path, tmp_path: Path) -> None:
    ckptool.export("step-4", root=root, out=tmp_path / "out")
    with pytest.raises(TargetExistsError) as caught:
        export(root, tmp_path / "out")
    assert caught.value.hint == f"ckptool push {tmp_path / 'out'} {MINE} brings what is there to the Hub"


def test_a_new_repository_is_private_when_asked(mine: Hub, root: Path, tmp_path: Path) -> None:
    export(root, tmp_path / "out", private=True)
    assert mine.repos[MINE].private
    with pytest.raises(UsageError, match="there and public"):
        export(root, tmp_path / "again", REPO, private=True)


def test_a_dry_run_makes_nothing(mine: Hub, root: Path, tmp_path: Path) -> None:
    assert export(root, tmp_path / "out", dry_run=True)["plan"] == f"a new repository {MINE} on the Hub, public"
    assert MINE not in mine.repos and not (tmp_path / "out").exists()


def test_an_interrupted_push_goes_on(mine: Hub, root: Path, tmp_path: Path) -> None:
    mine.fault = lambda method, path: "400" if "/commit/" in path else ""
    with pytest.raises(CkptoolError) as raised:
        export(root, tmp_path / "out")
    assert "goes on from where this one stopped" in raised.value.hint
    assert mine.repos[MINE].titles == ["initial commit"] and not (tmp_path / "out").exists()
    sent = mine.count("PUT", "/lfs/")
    mine.fault = lambda method, path: ""
    export(root, tmp_path / "out")
    assert sent > 1 and mine.count("PUT", "/lfs/") == sent
    assert len(mine.repos[MINE].titles) == 2 and (tmp_path / "out").is_dir()


def test_a_commit_whose_answer_is_lost_has_been_made(mine: Hub, root: Path, tmp_path: Path) -> None:
    mine.fault = lambda method, path: "lost" if "/commit/" in path else ""
    assert export(root, tmp_path / "out")["commit"] == mine.repos[MINE].branches["main"]


def test_another_s_push_in_between_is_noticed(mine: Hub, root: Path, tmp_path: Path) -> None:
    def meddle(method: str, path: str) -> str:
        if "/info/lfs/" in path:
            mine.repos[MINE].commit("main", {"config.json": File(b"{}", False)}, "another's")
        return ""

    mine.fault = meddle
    with pytest.raises(StorageError, match="something else was pushed"):
        export(root, tmp_path / "out")
    assert mine.repos[MINE].titles[-1] == "another's"


def test_who_may_not_push_hears_it_before_the_work(
    hub: Hub, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token, repo, says in (
        (None, MINE, "needs a Hub token"),
        ("hf_wrong", MINE, "does not accept your token"),
        (TOKEN, "other/theirs", "you are me"),
    ):
        monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN", raising=False)
        with pytest.raises(AccessError, match=says):
            export(root, tmp_path / "out", repo)
    with pytest.raises(UsageError, match="no repository of the Hub"):
        export(root, tmp_path / "out", "just-a-name")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_pushed_as_it_is(mine: Hub, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["push", str(folder), MINE, "--dry-run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["push"]["commit"] == "" and MINE not in mine.repos
    assert run(["push", str(folder), MINE]) == 0
    assert "pushed to" in capfd.readouterr().out
    files = mine.repos[MINE].files() or {}
    assert ModelCard(files["README.md"].content.decode()).data.to_dict() == {"library_name": "transformers"}
    assert run(["push", str(folder), MINE]) == 6


def test_the_token_is_in_nothing_that_a_push_writes_or_says(
    mine: Hub, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTOOL_DEBUG", "1")
    command = ["export", "step-4", "--root", str(root), "--push", MINE, "--json"]
    for number, (fault, where) in enumerate((("403", "/lfs/"), ("400", "/commit/"), ("401", "/preupload/"), ("", ""))):
        mine.fault = lambda method, path, fault=fault, where=where: fault if where in path else ""  # type: ignore[misc]
        assert run([*command, "--out", str(tmp_path / f"out-{number}")]) == (1 if fault else 0)
    captured = capfd.readouterr()
    written = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    written += "".join(str(file.content) for file in (mine.repos[MINE].files() or {}).values())
    for secret in (TOKEN, SIGNATURE):
        assert secret not in captured.out + captured.err
        assert secret not in written
