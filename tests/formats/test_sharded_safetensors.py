"""DCP in safetensors, written by torch on two ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptool
from ckptool.cli.main import run
from ckptool.core.box import Box
from ckptool.core.mesh import Mesh
from ckptool.errors import DamagedError, TargetExistsError
from ckptool.formats.sharded_safetensors import ShardedSafetensors
from tests.spawn import run_ranks
from tests.tiny_models import llama


def write(rank: int, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    placements = {"norm": Replicate(), "o_proj": Shard(1), "down_proj": Shard(1)}
    state = {
        name: distribute_tensor(t, mesh, [next((p for part, p in placements.items() if part in name), Shard(0))])
        for name, t in tensors.items()
    }
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))


@pytest.fixture(scope="module")
def model() -> transformers.LlamaForCausalLM:
    return llama(tied=False)


@pytest.fixture(scope="module")
def folder(model: transformers.LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded") / "model"
    run_ranks(2, write, path, dict(model.state_dict()))
    model.config.save_pretrained(path / ".hf_metadata")
    assert len(list(path.glob("shard-*-model-*.safetensors"))) == 2
    return path


def test_it_comes_in_whole(folder: Path, tmp_path: Path, model: transformers.LlamaForCausalLM) -> None:
    ckptool.import_hf(str(folder), "nemo", root=tmp_path)
    ckptool.export("nemo", root=tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "nemo-hf", dtype="auto").state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in model.state_dict().items())
    assert ckptool.verify("nemo", root=tmp_path, against=str(folder)).exit_code == 0
    assert ckptool.verify(str(folder), finite=True).exit_code == 0


def test_it_is_shown_and_exported_as_it_is(
    folder: Path, tmp_path: Path, model: transformers.LlamaForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its own name, and by that of the step's folder around it."""
    step = tmp_path / "epoch_0_step_10"
    shutil.copytree(folder, step / "model")
    for name in (folder, step):
        assert run(["inspect", str(name), "--keys", "*norm*", "--json"]) == 0
        details = json.loads(capsys.readouterr().out)
        assert details["num_tensors"] == len(model.state_dict()) and details["sections"] == {"model": 21}
    assert run(["export", str(step), "--out", str(tmp_path / "out")]) == 0
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in model.state_dict().items())
    assert run(["export", str(step), "--to", "torch", "--out", str(tmp_path / "all.pt")]) == 0
    single = torch.load(tmp_path / "all.pt", weights_only=True)
    assert all(torch.equal(single[name], tensor) for name, tensor in model.state_dict().items())
    assert run(["export", str(folder), "--engine", "torch", "--out", str(tmp_path / "no")]) == 2
    assert "not those of" in capsys.readouterr().err
    assert run(["plan", str(folder), "--world-size", "2"]) == 1
    assert f"ckptool import-hf {folder}" in capsys.readouterr().err


def load_stock(rank: int, path: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    """The names of the tensors that torch's own reader gets wrong, cut anew over all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state = {name: distribute_tensor(torch.full_like(t, -7), mesh, [Shard(0)]) for name, t in tensors.items()}
    dcp.load(state, checkpoint_id=path)
    return [name for name, tensor in tensors.items() if not torch.equal(state[name].full_tensor(), tensor)]


def test_resharded_it_is_a_checkpoint_of_the_same_names(
    folder: Path, tmp_path: Path, model: transformers.LlamaForCausalLM
) -> None:
    """By the name of the step's folder; the model's config is taken along, and exports go by it."""
    shutil.copytree(folder, tmp_path / "step" / "model")
    (tmp_path / "step" / "model" / ".hf_metadata" / "fqn_to_file_index_mapping.json").write_text("{}")
    command = ["reshard", str(tmp_path / "step"), "three", "--root", str(tmp_path), "--world-size", "3"]
    assert run([*command, "--dry-run"]) == 0 and not (tmp_path / "three").exists()
    assert run(command) == 0
    tensors = dict(model.state_dict())
    assert run_ranks(3, load_stock, tmp_path / "three", tensors) == [[], [], []]
    manifest = ckptool.open_checkpoint(tmp_path / "three")
    assert manifest.tensors.keys() == tensors.keys()
    assert {chunk.locator.file for chunk in manifest.tensors["lm_head.weight"].chunks if chunk.locator} <= {
        f"__{rank}_0.distcp" for rank in range(3)
    }
    assert ckptool.verify("three", root=tmp_path, against=str(folder)).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "three" / "hf").iterdir()) == ["config.json"]
    ckptool.export("three", root=tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "three-hf", dtype="auto").state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("options", [[], ["--model-only"]])
def test_it_is_copied_whole(folder: Path, tmp_path: Path, options: list[str]) -> None:
    assert run(["copy", str(folder), str(tmp_path / "copy"), *options]) == 0

    def files(path: Path) -> dict[str, bytes]:
        return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}

    assert files(tmp_path / "copy") == files(folder)
    with pytest.raises(TargetExistsError):
        ckptool.copy(str(folder), str(tmp_path / "copy"))


def test_a_damaged_one_is_not_resharded(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "cut")
    min((tmp_path / "cut").glob("*.safetensors")).unlink()
    with pytest.raises(DamagedError):
        ckptool.reshard(str(tmp_path / "cut"), str(tmp_path / "no"), mesh=Mesh.of({"dp": 2}))
    assert not (tmp_path / "no").exists()


def test_any_box_is_read(folder: Path, model: transformers.LlamaForCausalLM) -> None:
    source = ShardedSafetensors(folder)
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.embed_tokens.weight"):
        whole = model.state_dict()[name]
        box = Box((5, 20), (37, 11))
        out = bytearray(box.num_elements * 2)
        source.read_into(name, box, memoryview(out))
        read = torch.frombuffer(out, dtype=torch.bfloat16).view(box.sizes)
        assert torch.equal(read, whole[5:42, 20:31])
    source.close()


@pytest.mark.parametrize("fault", ["a rank's file is gone", "offsets are gone", "parts overlap"])
def test_parts_that_make_no_tensors_are_refused(tmp_path: Path, fault: str) -> None:
    halves = [{"a": torch.ones(3, 2)}, {"a": torch.ones(2, 2)}]
    for rank, (tensors, row) in enumerate(zip(halves, (0, 2 if fault == "parts overlap" else 3), strict=True)):
        info = {} if fault == "offsets are gone" else {"a": {"saved_offsets": [row, 0]}}
        file = tmp_path / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        save_file(tensors, file, {"DCP_SHARDING_INFO": json.dumps(info)})
    if fault == "a rank's file is gone":
        min(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(DamagedError):
        ShardedSafetensors(tmp_path)
    assert ckptool.verify(str(tmp_path)).exit_code == 4
    assert load_file(max(tmp_path.glob("*.safetensors")))["a"].shape == (2, 2)


COUNT_NOTE = "nothing says how many shard files there should be; 1 were found"


def test_without_the_last_file_the_config_tells(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    max(cut.glob("*.safetensors")).unlink()
    found = ckptool.verify(str(cut), level="structure")
    assert found.exit_code == 3 and "config.json wants shape" in found.findings[0].message
    for command in (["copy", str(cut)], ["reshard", "--world-size", "2", str(cut)]):
        assert run([*command, str(tmp_path / "no")]) == 3
        assert "is a shard file missing? 1 were found" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_without_a_config_the_number_of_files_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    shutil.rmtree(cut / ".hf_metadata")
    max(cut.glob("*.safetensors")).unlink()
    commands = (
        ["verify"],
        ["inspect"],
        ["copy", str(tmp_path / "a")],
        ["reshard", str(tmp_path / "b"), "--mesh", "dp=2"],
    )
    for command, *rest in commands:
        assert run([command, str(cut), *rest, "--json"]) == 0
        assert COUNT_NOTE in json.loads(capsys.readouterr().out)["notes"]
        assert run([command, str(cut), *rest, *(["--overwrite"] if rest else [])]) == 0
        assert COUNT_NOTE in "".join(capsys.readouterr()).replace("\n", " ")


def test_a_copy_says_that_there_are_no_checksums(folder: Path, tmp_path: Path) -> None:
    copied = ckptool.copy(str(folder), str(tmp_path / "copy"))
    resharded = ckptool.reshard(str(folder), str(tmp_path / "two"), mesh=Mesh.of({"dp": 2}))
    for result in (copied, resharded):
        assert [note for note in result.notes if note.startswith("safetensors files carry no checksums")]


def test_tensors_that_the_model_lacks_are_let_pass(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "more")
    info = {"DCP_SHARDING_INFO": json.dumps({"v_head.weight": {"saved_offsets": [0, 0]}})}
    save_file(
        {"v_head.weight": torch.ones(1, 2)}, tmp_path / "more" / "shard-00001-model-00002-of-00002.safetensors", info
    )
    assert ckptool.verify(str(tmp_path / "more")).exit_code == 0


def test_a_hole_in_the_numbers_of_files_is_refused(tmp_path: Path) -> None:
    for number in (1, 3):
        info = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [number // 2, 0]}})}
        save_file({"a": torch.ones(1, 2)}, tmp_path / f"shard-{number:05}-model-00001-of-00001.safetensors", info)
    with pytest.raises(DamagedError, match="shard-00002-model"):
        ShardedSafetensors(tmp_path)


def test_a_consolidated_folder_is_sent_to_import_hf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file({"a": torch.ones(2, 2)}, whole / "model-00001-of-00001.safetensors")
    for command in (["copy", str(whole)], ["reshard", "--world-size", "2", str(whole)]):
        assert run([*command, str(tmp_path / "no")]) == 1
        assert f"ckptool import-hf {whole}" in capsys.readouterr().err.replace("\n", "")
    assert run(["import-hf", str(whole), "taken", "--root", str(tmp_path)]) == 0
