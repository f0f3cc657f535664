from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, safe_open, save_file

import ckptool
from ckptool.errors import DamagedError, MismatchError, NotFoundError, TargetExistsError, UnsupportedError, UsageError
from tests.tiny_models import llama, mixtral, save_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "one-file": save_folder(llama(), base / "one-file"),
        "sharded": save_folder(llama(tied=False), base / "sharded", max_shard_size="20KB"),
        "experts": save_folder(mixtral(), base / "experts", max_shard_size="60KB"),
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def side_bytes(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and ".safetensors" not in p.name
    }


def assert_same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert set(a) == set(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


def load_all(checkpoint: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint with torch alone."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint, tmp_path / "all.pt")
    return torch.load(tmp_path / "all.pt", weights_only=True)["model"]


@pytest.mark.parametrize("model", ["one-file", "sharded", "experts"])
def test_there_and_back_is_bit_for_bit(folders: dict[str, Path], tmp_path: Path, model: str) -> None:
    source = folders[model]
    ckptool.import_hf(str(source), root=tmp_path, chunk_bytes=4096)
    result = ckptool.export(model, root=tmp_path, max_shard_bytes=30_000 if model != "one-file" else 1 << 30)
    out = Path(result.target)
    assert out == tmp_path / f"{model}-hf"
    assert_same_tensors(weights(out), weights(source))
    assert side_bytes(out) == side_bytes(source)
    if model == "one-file":
        assert (out / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(weights(source))
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in weights(source).values())


@pytest.mark.parametrize("model", ["one-file", "experts"])
@pytest.mark.parametrize("dtype", ["keep", "fp16"])
def test_both_engines_give_the_same_bits(folders: dict[str, Path], tmp_path: Path, model: str, dtype: str) -> None:
    for engine in ("stream", "transformers"):
        ckptool.import_hf(str(folders[model]), engine, root=tmp_path, engine=engine, dtype=dtype)
    assert_same_tensors(load_all(tmp_path / "stream", tmp_path), load_all(tmp_path / "transformers", tmp_path))
    for engine in ("stream", "torch"):
        ckptool.export("stream", root=tmp_path, out=tmp_path / f"out-{engine}", engine=engine, dtype="fp32")
        ckptool.export("transformers", root=tmp_path, out=tmp_path / f"out2-{engine}", engine=engine, dtype="fp32")
    outs = [weights(tmp_path / name) for name in ("out-stream", "out-torch", "out2-stream", "out2-torch")]
    for other in outs[1:]:
        assert_same_tensors(outs[0], other)
    assert side_bytes(tmp_path / "out-stream") == side_bytes(tmp_path / "out-torch")


def test_the_torch_file_equals_the_reference_road(folders: dict[str, Path], tmp_path: Path) -> None:
    ckptool.import_hf(str(folders["sharded"]), "base", root=tmp_path)
    for engine in ("stream", "torch"):
        ckptool.export("base", to="torch", root=tmp_path, out=tmp_path / f"{engine}.pt", engine=engine)
    ours, reference = (torch.load(tmp_path / f"{e}.pt", weights_only=True) for e in ("stream", "torch"))
    assert_same_tensors(ours["model"], reference["model"])


def test_an_exports_logits_are_the_sources(folders: dict[str, Path], tmp_path: Path) -> None:
    ckptool.import_hf(str(folders["experts"]), "base", root=tmp_path)
    ckptool.export("base", root=tmp_path)
    tokens = torch.arange(2, 14).view(1, -1)
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        for folder in (folders["experts"], tmp_path / "base-hf")
    ]
    assert torch.equal(*logits)


def test_a_cast_changes_the_config_and_nothing_else(folders: dict[str, Path], tmp_path: Path) -> None:
    ckptool.import_hf(str(folders["one-file"]), "base", root=tmp_path, dtype="fp32")
    result = ckptool.export("base", root=tmp_path)
    assert {t.dtype for t in weights(tmp_path / "base-hf").values()} == {torch.float32}
    before, after = side_bytes(folders["one-file"]), side_bytes(tmp_path / "base-hf")
    assert json.loads(after.pop("config.json")) == {**json.loads(before.pop("config.json")), "dtype": "float32"}
    assert after == before
    assert any("float32" in note for note in result.notes)
    ckptool.export("base", root=tmp_path, out=tmp_path / "bf16", dtype="bf16")
    assert_same_tensors(weights(tmp_path / "bf16"), weights(folders["one-file"]))


def test_tensors_are_cut_and_tied_ones_stored_once(folders: dict[str, Path], tmp_path: Path) -> None:
    ckptool.import_hf(str(folders["one-file"]), "base", root=tmp_path, chunk_bytes=1000)
    manifest = ckptool.open_checkpoint(tmp_path / "base")
    assert all(c.box.num_elements * t.itemsize_bytes <= 1000 for t in manifest.tensors.values() for c in t.chunks)
    assert manifest.ties == {"model.lm_head.weight": "model.model.embed_tokens.weight"}
    stored = sum(size for file, size in manifest.files.items() if file.endswith(".distcp"))
    assert stored < manifest.num_bytes + 2000 * manifest.num_chunks
    assert {p.name for p in (tmp_path / "base").iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "ckptool.json",
        "digests.json",
        "hf",
    }


def test_stock_load_reads_both_names_of_a_tie(folders: dict[str, Path], tmp_path: Path) -> None:
    ckptool.import_hf(str(folders["one-file"]), "base", root=tmp_path)
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    assert "lm_head.weight" in state["model"]
    dcp.load(state, checkpoint_id=tmp_path / "base", no_dist=True)
    assert_same_tensors(dict(llama().state_dict()), state["model"])


def test_a_false_tie_is_kept_apart_and_said(folders: dict[str, Path], tmp_path: Path) -> None:
    source = save_folder(llama(), tmp_path / "source")
    stored = weights(source)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + 1
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    result = ckptool.import_hf(str(source), "base", root=tmp_path)
    assert any("differ" in note for note in result.notes)
    ckptool.export("base", root=tmp_path)
    assert_same_tensors(weights(tmp_path / "base-hf"), stored)
    assert json.loads((tmp_path / "base-hf" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_tie_stored_twice_goes_back_twice(tmp_path: Path) -> None:
    source = save_folder(llama(), tmp_path / "source")
    stored = weights(source)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    ckptool.import_hf(str(source), "base", root=tmp_path)
    for engine in ("stream", "torch"):
        ckptool.export("base", root=tmp_path, out=tmp_path / engine, engine=engine)
        assert_same_tensors(weights(tmp_path / engine), stored)


@pytest.mark.parametrize("engine", ["stream", "torch"])
def test_tensors_the_model_has_no_use_for_come_back(tmp_path: Path, engine: str) -> None:
    source = save_folder(llama(), tmp_path / "source")
    stored = weights(source)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    stored["model.rotary_emb.inv_freq"] = torch.rand(4)
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    result = ckptool.import_hf(str(source), "base", root=tmp_path)
    assert any("kept aside" in note for note in result.notes)
    assert not any("inv_freq" in fqn for fqn in ckptool.open_checkpoint(tmp_path / "base").tensors)
    ckptool.export("base", root=tmp_path, engine=engine)
    assert_same_tensors(weights(tmp_path / "base-hf"), stored)
    assert side_bytes(tmp_path / "base-hf") == side_bytes(source)


def test_heads_of_other_tasks_come_back(tmp_path: Path) -> None:
    sizes = {"vocab_size": 31, "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20}
    config = transformers.BertConfig(**sizes, num_hidden_layers=1)
    source = save_folder(transformers.BertForPreTraining(config), tmp_path / "source")
    stored = weights(source)
    changed = json.loads((source / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (source / "config.json").write_text(json.dumps(changed))
    result = ckptool.import_hf(str(source), "base", root=tmp_path)
    assert any("pooler" in note and "cls.seq_relationship" in note for note in result.notes)
    assert not any("pooler" in fqn for fqn in ckptool.open_checkpoint(tmp_path / "base").tensors)
    ckptool.export("base", root=tmp_path)
    assert_same_tensors(weights(tmp_path / "base-hf"), stored)


def test_a_single_file_imports_with_the_config_beside_it(folders: dict[str, Path], tmp_path: Path) -> None:
    result = ckptool.import_hf(str(folders["one-file"] / "model.safetensors"), root=tmp_path)
    assert Path(result.target) == tmp_path / "model"
    assert_same_tensors(load_all(tmp_path / "model", tmp_path), llama().state_dict())


def test_a_file_without_config_keeps_its_names(tmp_path: Path) -> None:
    save_file({"a.b": torch.ones(3, 2), "n": torch.arange(3)}, tmp_path / "x.safetensors")
    result = ckptool.import_hf(str(tmp_path / "x.safetensors"), "plain", root=tmp_path, dtype="bf16")
    assert any("keep their names" in note for note in result.notes)
    assert_same_tensors(
        load_all(tmp_path / "plain", tmp_path), {"a.b": torch.ones(3, 2).bfloat16(), "n": torch.arange(3)}
    )


def test_a_dry_run_plans_the_same_and_writes_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    planned = ckptool.import_hf(str(folders["sharded"]), "base", root=tmp_path / "root", dry_run=True)
    assert planned.plan is not None and not planned.executed
    assert not (tmp_path / "root").exists()
    done = ckptool.import_hf(str(folders["sharded"]), "base", root=tmp_path / "root")
    assert done.plan is not None and done.plan.to_json() == planned.plan.to_json()
    files = [p for p in (tmp_path / "root").rglob("*") if p.is_file() and p.name not in (".metadata", "ckptool.json")]
    assert sum(p.stat().st_size for p in files) <= planned.plan.disk_bytes


def test_progress_counts_every_byte(folders: dict[str, Path], tmp_path: Path) -> None:
    seen: list[int] = []
    result = ckptool.import_hf(str(folders["experts"]), "base", root=tmp_path, progress=lambda plan: seen.append)
    assert result.plan is not None and sum(seen) == result.plan.write_bytes


def test_an_existing_target_is_refused_and_untouched(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "mine.txt").write_text("keep me")
    with pytest.raises(TargetExistsError):
        ckptool.import_hf(str(folders["one-file"]), "base", root=tmp_path)
    assert (tmp_path / "base" / "mine.txt").read_text() == "keep me"


def test_a_failure_in_the_middle_leaves_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_folder(llama(tied=False), source, max_shard_size="20KB")

    def interrupt(plan: object) -> object:
        count = iter(range(100))

        def report(num_bytes: int) -> None:
            if next(count) == 7:
                raise KeyboardInterrupt

        return report

    with pytest.raises(KeyboardInterrupt):
        ckptool.import_hf(str(source), "base", root=tmp_path / "root", progress=interrupt)  # type: ignore[arg-type]
    assert list((tmp_path / "root").iterdir()) == []


def test_index_and_files_must_agree_both_ways(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_folder(llama(tied=False), source, max_shard_size="20KB")
    index_path = source / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shards = sorted(set(index["weight_map"].values()))

    index["weight_map"]["model.no.such.weight"] = shards[0]
    index_path.write_text(json.dumps(index))
    with pytest.raises(DamagedError, match=r"model\.no\.such\.weight"):
        ckptool.import_hf(str(source), "base", root=tmp_path)
    del index["weight_map"]["model.no.such.weight"]
    index_path.write_text(json.dumps(index))

    save_file({"model.norm.weight": torch.zeros(48)}, source / "stray.safetensors")
    assert any("stray.safetensors" in n for n in ckptool.import_hf(str(source), "base", root=tmp_path).notes)

    (source / shards[1]).rename(source / "hidden")
    with pytest.raises(DamagedError, match=shards[1]):
        ckptool.import_hf(str(source), "other", root=tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedError, "gptq"),
        ({"model_type": "no-such-model", "architectures": ["NoSuchModel"]}, UnsupportedError, "can't read its config"),
        ({"vocab_size": 98}, MismatchError, r"wants shape \[98, 48\]"),
        ({"num_hidden_layers": 3}, MismatchError, "lack model.layers.2"),
        ({"num_hidden_layers": 1}, MismatchError, "no place for model.layers.1"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_before_a_byte_is_written(
    folders: dict[str, Path], tmp_path: Path, change: dict[str, object], error: type[Exception], says: str
) -> None:
    source = save_folder(llama(), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error, match=says):
        ckptool.import_hf(str(source), "base", root=tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_bad_options_are_usage_errors(folders: dict[str, Path], tmp_path: Path) -> None:
    source = str(folders["one-file"])
    with pytest.raises(UsageError):
        ckptool.import_hf(source, "a", root=tmp_path, dtype="fp8")
    with pytest.raises(UsageError):
        ckptool.import_hf(source, "a", root=tmp_path, engine="fast")
    with pytest.raises(UsageError):
        ckptool.import_hf(source, "..", root=tmp_path)
    with pytest.raises(NotFoundError):
        ckptool.export("nothing", root=tmp_path)


def test_exported_files_open_with_the_safetensors_library(folders: dict[str, Path], tmp_path: Path) -> None:
    ckptool.import_hf(str(folders["sharded"]), "base", root=tmp_path)
    ckptool.export("base", root=tmp_path, max_shard_bytes=20_000)
    for file in (tmp_path / "base-hf").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert opened.keys()
