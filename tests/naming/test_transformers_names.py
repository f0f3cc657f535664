from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ckptool import engine
from ckptool.core.cuts import cut_tensor, stream_tensor
from ckptool.core.provenance import Provenance
from ckptool.errors import MismatchError
from ckptool.formats.hf_folder import HfSource
from ckptool.naming.groups import NamePlan
from ckptool.naming.meta_model import build_meta_model
from ckptool.naming.transformers_names import plan_export, plan_import
from ckptool.planner import plan_conversion
from tests.memory_sink import MemorySink, MemorySource
from tests.tiny_models import llama, mixtral, save_folder


def import_tensors(folder: Path, dtype: str | None = None) -> tuple[dict[str, torch.Tensor], NamePlan]:
    source = HfSource(folder)
    names = plan_import(
        build_meta_model(folder, dtype),
        source.manifest.tensors,
        dtype,
        lambda a, b: torch.equal(_load(folder, a), _load(folder, b)),
    )
    plan = plan_conversion("import", source.manifest, names, "memory", cut=cut_tensor, piece_bytes=1000)
    sink = MemorySink([entry for item in plan.items for entry in item.targets])
    sink.finish(engine.run(plan.parts, source, sink))
    assert sink.finished
    assert all((count == 1).all() for count in sink.written.values())
    return sink.tensors, names


def export_tensors(
    folder: Path, live: dict[str, torch.Tensor], provenance: Provenance | None, dtype: str | None = None
) -> dict[str, torch.Tensor]:
    source = MemorySource(live)
    names = plan_export(build_meta_model(folder, dtype), source.manifest.tensors, provenance, dtype)
    plan = plan_conversion("export", source.manifest, names, "memory", cut=stream_tensor, piece_bytes=1000)
    sink = MemorySink([entry for item in plan.items for entry in item.targets])
    sink.finish(engine.run(plan.parts, source, sink))
    assert all((count == 1).all() for count in sink.written.values())
    return sink.tensors


def _load(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[name]


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert set(a) == set(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


def record(names: NamePlan) -> Provenance:
    return Provenance("test", naming=names.naming, ties=dict(names.ties), stored_tied_names=names.stored_tied_names)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_fused_experts_equal_from_pretrained_and_go_back(tmp_path: Path, dtype: str | None) -> None:
    save_folder(mixtral(), tmp_path)
    live, names = import_tensors(tmp_path, dtype)
    wanted = getattr(torch, dtype) if dtype else "auto"
    reference = transformers.MixtralForCausalLM.from_pretrained(tmp_path, dtype=wanted).state_dict()
    assert_equal(live, reference)
    assert names.naming.transforms
    exported = export_tensors(tmp_path, live, record(names))
    stored = load_file(tmp_path / "model.safetensors")
    assert_equal(exported, {n: t.to(wanted) if dtype and t.is_floating_point() else t for n, t in stored.items()})


def test_without_a_record_export_does_what_save_pretrained_does(tmp_path: Path) -> None:
    model = mixtral()
    save_folder(model, tmp_path)
    assert_equal(export_tensors(tmp_path, model.state_dict(), None), load_file(tmp_path / "model.safetensors"))


def test_a_tie_is_stored_once_under_the_canonical_name(tmp_path: Path) -> None:
    save_folder(llama(tied=True), tmp_path)
    live, names = import_tensors(tmp_path)
    assert "lm_head.weight" not in live
    assert names.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert names.stored_tied_names == ("model.embed_tokens.weight",)


def test_a_tie_stored_under_its_alias_is_found(tmp_path: Path) -> None:
    save_folder(llama(tied=True), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    live, names = import_tensors(tmp_path)
    assert torch.equal(live["model.embed_tokens.weight"], stored["lm_head.weight"])
    assert names.stored_tied_names == ("lm_head.weight",)


@pytest.mark.parametrize("same", [True, False])
def test_a_tie_stored_twice_is_compared(tmp_path: Path, same: bool) -> None:
    save_folder(llama(tied=True), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    if not same:
        stored["lm_head.weight"][5, 7] += 1
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    live, names = import_tensors(tmp_path)
    assert ("lm_head.weight" in live) is not same
    assert (names.untied == {"lm_head.weight": "model.embed_tokens.weight"}) is not same
    assert any("differ" in note for note in names.notes) is not same


def test_names_that_do_not_fit_the_model_are_listed(tmp_path: Path) -> None:
    save_folder(llama(tied=False), tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    for broken, says in (
        ({n: t for n, t in good.items() if n != name}, f"lack {name}"),
        ({**good, "model.extra.weight": torch.ones(2)}, "no place for model.extra.weight"),
        ({**good, name: good[name][:-1].clone()}, r"wants shape \[48, 48\], the weights give \[47, 48\]"),
    ):
        save_file(broken, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(MismatchError, match=says):
            import_tensors(tmp_path)


def test_a_stored_buffer_that_the_model_computes_is_kept_aside(tmp_path: Path) -> None:
    torch.manual_seed(2)
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=40
    )
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["embeddings.position_ids"] = torch.arange(512).view(1, -1)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    live, names = import_tensors(tmp_path, "float16")
    assert {t.dtype for t in live.values()} == {torch.float16}
    assert names.extra == ("embeddings.position_ids",)


def test_export_refuses_a_checkpoint_that_lacks_tensors(tmp_path: Path) -> None:
    model = llama(tied=False)
    save_folder(model, tmp_path)
    state = model.state_dict()
    del state["model.norm.weight"]
    with pytest.raises(MismatchError, match=r"lacks tensors of LlamaForCausalLM: model\.norm\.weight"):
        export_tensors(tmp_path, state, None)


def test_a_recorded_transform_that_is_gone_is_an_error_not_a_guess(tmp_path: Path) -> None:
    save_folder(mixtral(), tmp_path)
    live, names = import_tensors(tmp_path)
    old = record(names).to_json()
    old["naming"]["transforms"] = [*old["naming"]["transforms"], "WeightRenaming(from a transformers long gone)"]
    old["naming"]["library_version"] = "5.0.0"
    with pytest.raises(MismatchError, match="no longer has") as caught:
        export_tensors(tmp_path, live, Provenance.from_json(old, "test"))
    assert caught.value.hint == "pip install transformers==5.0.0"
