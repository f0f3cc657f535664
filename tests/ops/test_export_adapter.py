"""An adapter in a checkpoint: for peft as a folder, or in the weights. peft itself gives the logits to compare with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

import ckptool
from ckptool.cli.main import run
from ckptool.core.parts import Part
from ckptool.errors import MismatchError, NotFoundError, StorageError, UnsupportedError, UsageError
from ckptool.formats.hf_sink import HfSink
from ckptool.storage.digests_file import weights_digest
from tests.tiny_models import llama, save_folder

peft = pytest.importorskip("peft", reason="pip install ckptool[lora]")

TOKENS = torch.arange(3, 15).view(1, -1)
TARGETS = ["q_proj", "k_proj", "down_proj"]


def adapted(base: Path, targets: Any = TARGETS, **options: Any) -> Any:
    torch.manual_seed(4)
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model.eval()


def matrices(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with `hub`, and `base`, its import."""
    root = tmp_path_factory.mktemp("root")
    save_folder(llama(dtype=torch.float32), root / "hub")
    ckptool.import_hf(str(root / "hub"), "base", root=root, chunk_bytes=3000)
    return root


@pytest.fixture(scope="module")
def root(base: Path) -> Path:
    """Beside them `step-1`, as the trainer saves it, and `foreign`, with all names as peft has them."""
    model = adapted(base / "hub")
    plain = {name.removeprefix("base_model.model.").replace(".default", ""): t for name, t in matrices(model).items()}
    record = {"type": "lora", "rank": 3, "alpha": 5.0, "base": "base", "base_digest": weights_digest(base / "base")}
    ckptool.save({"model": plain}, base / "step-1", provenance=ckptool.Provenance("0", adapter=record))
    dcp.save({"model": matrices(model), "step": 1}, checkpoint_id=base / "foreign", no_dist=True)
    return base


@torch.no_grad()
def assert_computes(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours.eval()(TOKENS).logits, expected(TOKENS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["step-1", "foreign"])
def test_peft_loads_the_folder(root: Path, tmp_path: Path, name: str) -> None:
    alpha = [] if name == "step-1" else ["--lora-alpha", "5"]
    command = ["export", name, "--adapter", "--root", str(root), "--out", str(tmp_path / "adapter"), *alpha]
    assert run(command) == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained(root / "hub")
    assert_computes(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter"), adapted(root / "hub"))
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.parametrize(("name", "options"), [("step-1", {}), ("foreign", {"base": "base", "lora_alpha": 5.0})])
def test_the_merged_model_computes_the_same(root: Path, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    result = ckptool.export(name, root=root, adapter="merge", out=tmp_path / "merged", **options)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_computes(merged, adapted(root / "hub"))
    assert any("merged" in note for note in result.notes)
    assert (tmp_path / "merged" / "chat_template.jinja").exists()
    expected = adapted(root / "hub").merge_and_unload().state_dict()
    for key, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-6, rtol=1e-6)


def test_a_merged_weight_too_large_for_the_base_s_dtype(root: Path, tmp_path: Path) -> None:
    ckptool.import_hf(str(root / "hub"), "narrow", root=tmp_path, dtype="fp16")
    options: dict[str, Any] = {"base": str(tmp_path / "narrow"), "lora_alpha": 1e7, "out": tmp_path / "merged"}
    with pytest.raises(MismatchError, match="values are too large for float16"):
        ckptool.export("foreign", root=root, adapter="merge", **options)
    assert not (tmp_path / "merged").exists()


def test_ranks_of_their_own(root: Path, tmp_path: Path) -> None:
    model = adapted(root / "hub", rank_pattern={"model.layers.1.self_attn.q_proj": 2})
    dcp.save({"model": matrices(model)}, checkpoint_id=tmp_path / "c", no_dist=True)
    ckptool.export(str(tmp_path / "c"), adapter="folder", lora_alpha=5.0, out=tmp_path / "adapter")
    record = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert record["rank_pattern"] == {"model.layers.1.self_attn.q_proj": 2}
    plain = transformers.AutoModelForCausalLM.from_pretrained(root / "hub")
    assert_computes(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter"), model)


def test_what_is_not_said_or_not_so_is_refused(root: Path, tmp_path: Path) -> None:
    def export(name: str, **options: Any) -> None:
        ckptool.export(name, root=root, out=tmp_path / "out", **options)

    with pytest.raises(UsageError, match="holds an adapter, no whole model"):
        export("step-1")
    with pytest.raises(UsageError, match="alpha"):
        export("foreign", adapter="folder")
    with pytest.raises(UsageError, match="which weights"):
        export("foreign", adapter="merge", lora_alpha=5.0)
    with pytest.raises(MismatchError, match="the checkpoint says 5"):
        export("step-1", adapter="folder", lora_alpha=6.0)
    with pytest.raises(NotFoundError, match="holds no adapter"):
        export("base", adapter="folder")
    save_folder(llama(dtype=torch.float32, tied=False), tmp_path / "other-hub")
    ckptool.import_hf(str(tmp_path / "other-hub"), "other", root=tmp_path)
    with pytest.raises(MismatchError, match="not what the adapter was trained on"):
        export("step-1", adapter="merge", base=str(tmp_path / "other"))
    shutil.copytree(root / "step-1", tmp_path / "elsewhere" / "step-1")
    with pytest.raises(NotFoundError, match="was trained on base, which is not beside it") as refused:
        export(str(tmp_path / "elsewhere" / "step-1"), adapter="merge")
    assert refused.value.hint == "--base NAME says where it is"
    assert not (tmp_path / "out").exists()


def test_other_kinds_of_adapters_are_refused(root: Path, tmp_path: Path) -> None:
    dora = adapted(root / "hub", use_dora=True)
    dcp.save({"model": matrices(dora)}, checkpoint_id=tmp_path / "dora", no_dist=True)
    with pytest.raises(UnsupportedError, match="lora_magnitude_vector"):
        ckptool.export(str(tmp_path / "dora"), adapter="folder", lora_alpha=5.0)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with `hub`, a GPT-2, whose layers keep their weights as (inputs, outputs), one of them square."""
    root = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(n_embd=48, n_head=6, n_layer=2, vocab_size=97, n_positions=32)
    torch.manual_seed(3)
    transformers.GPT2LMHeadModel(config).save_pretrained(root / "hub")
    ckptool.import_hf(str(root / "hub"), "base", root=root, chunk_bytes=3000)
    return root


@pytest.mark.parametrize("is_told", [True, False])
def test_weights_that_are_the_other_way_round_are_merged_so(gpt2: Path, tmp_path: Path, is_told: bool) -> None:
    """Whether a folder of peft's says `fan_in_fan_out` or not, which depends on the layer that was wrapped last."""
    model = adapted(gpt2 / "hub", ["attn.c_attn", "attn.c_proj", "mlp.c_fc"], fan_in_fan_out=True)
    model.save_pretrained(tmp_path / "peft")
    record = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(record | {"fan_in_fan_out": is_told}))
    ckptool.import_hf(str(gpt2 / "hub"), "c", root=tmp_path, adapter=str(tmp_path / "peft"))
    ckptool.export("c", root=tmp_path, adapter="merge", out=tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_computes(merged, model)
    expected = model.merge_and_unload().state_dict()
    for key, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-6, rtol=1e-6)


def test_an_adapter_of_a_gpt2_that_a_trainer_saved_is_merged(gpt2: Path, tmp_path: Path) -> None:
    model = adapted(gpt2 / "hub", ["c_proj"], fan_in_fan_out=True)
    dcp.save({"model": matrices(model)}, checkpoint_id=tmp_path / "c", no_dist=True)
    ckptool.export(str(tmp_path / "c"), adapter="merge", lora_alpha=5.0, base=str(gpt2 / "base"), out=tmp_path / "out")
    assert_computes(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)


def test_a_merging_export_goes_on_unless_it_merges_something_else(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(alpha: float) -> list[str]:
        options = {"base": "base", "lora_alpha": alpha, "num_workers": 1, "max_shard_bytes": 1}
        return list(ckptool.export("foreign", root=root, adapter="merge", out=tmp_path / "merged", **options).notes)

    def interrupt() -> None:
        real, written = HfSink.open, []

        def until_the_disk_is_full(sink: HfSink, part: Part) -> Any:
            written.append(part)
            if len(written) > 3:
                raise StorageError("no space left")
            return real(sink, part)

        with monkeypatch.context() as patch:
            patch.setattr(HfSink, "open", until_the_disk_is_full)
            with pytest.raises(StorageError):
                export(5.0)

    interrupt()
    assert any(note.startswith("went on from an interrupted attempt: 3 of") for note in export(5.0))
    assert_computes(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), adapted(root / "hub"))
    shutil.rmtree(tmp_path / "merged")
    interrupt()
    assert any(note.startswith("started over") for note in export(6.0))
