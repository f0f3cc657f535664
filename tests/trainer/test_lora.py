"""LoRA: only the adapter is trained and saved, on any world size, and peft itself reads what was saved."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ckptool
from ckptool import MismatchError, UsageError
from tests.trainer.test_exactly_once import run_on
from tests.trainer.test_meshes import make_model
from tests.trainer.tiny import at_most, make_base, read_lines, run, surviving_samples, tiny_config
from trainer import checkpoint, parallel
from trainer.build import build_state
from trainer.metrics import Log
from trainer.origin import find_origin

peft = pytest.importorskip("peft", reason="pip install ckptool[lora]")

LORA = {"lora_rank": 4, "schedule": "constant", "lr": 3e-2}
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def adapted(pristine, tmp_path_factory):
    """A root where an adapter was trained: 2 steps on 2 ranks, 2 on one, 2 on 3 (or as many as there are GPUs)."""
    root = shutil.copytree(pristine, tmp_path_factory.mktemp("adapted") / "root")
    run_on(at_most(2), root, steps=2, **LORA)
    run(root, steps=4, **LORA)
    run_on(at_most(3), root, steps=6, **LORA)
    return root


def test_an_adapter_goes_on_on_any_world_size_as_if_never_interrupted(adapted, root):
    lines = read_lines(adapted / "metrics.jsonl")
    assert [line["world_size"] for line in lines] == [at_most(ranks) for ranks in (2, 2, 1, 1, 3, 3)]
    assert surviving_samples(adapted) == list(range(36))
    whole = run(root, steps=6, **LORA)
    for line, one in zip(lines, whole, strict=True):
        assert line["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    assert lines[5]["loss"] < lines[0]["loss"]


def test_a_fresh_adapter_is_the_base(adapted, root):
    all_weights = run(root, steps=1)
    assert read_lines(adapted / "metrics.jsonl")[0]["loss"] == pytest.approx(all_weights[0]["loss"], rel=1e-6)


def test_a_checkpoint_holds_the_adapter_alone_and_names_its_base(adapted, pristine):
    manifest = ckptool.open_checkpoint(adapted / "step-6")
    weights = {name for name in manifest.tensors if name.startswith("model.")}
    parts = [f"{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}" for name in PARTS]
    assert weights == {
        f"model.model.layers.{layer}.{part}.lora_{side}.weight" for layer in (0, 1) for part in parts for side in "AB"
    }
    moments = {name for name in manifest.tensors if name.startswith("optim.") and name.endswith(".exp_avg")}
    assert len(moments) == len(weights)
    record = manifest.provenance.adapter
    assert {key: record[key] for key in ("type", "rank", "alpha", "base")} == {
        "type": "lora",
        "rank": 4,
        "alpha": 8,
        "base": "base",
    }
    assert ckptool.verify(adapted / "step-6").exit_code == 0
    before, after = ((root / "base" / "digests.json").read_bytes() for root in (pristine, adapted))
    assert before == after


def test_exported_alone_or_merged_it_computes_what_was_trained(adapted, tmp_path):
    with parallel.joined_ranks("cpu") as ranks:
        config = tiny_config(adapted, steps=7, **LORA)
        origin = find_origin(config)
        position = ckptool.DataPosition.from_json((adapted / "step-6" / "data_position.json").read_text(), "step-6")
        state = build_state(config, ranks, origin, position)
        checkpoint.resume(state, origin, Log(adapted, rank=0))
        tokens = torch.arange(40).view(2, 20) * 6
        expected = state.model.eval()(input_ids=tokens).logits.detach()
    ckptool.export("step-6", root=adapted, out=tmp_path / "adapter", adapter="folder")
    ckptool.export("step-6", root=adapted, out=tmp_path / "merged", adapter="merge")
    ckptool.export("base", root=adapted, out=tmp_path / "plain", dtype="fp32")
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain = load(tmp_path / "plain", dtype=torch.float32).eval()
    assert (plain(input_ids=tokens).logits - expected).abs().max() > 1e-2
    with_adapter = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    assert torch.allclose(with_adapter(input_ids=tokens).logits, expected, atol=1e-5)
    # The base is bf16, and so are the merged weights: rounded once more.
    merged = load(tmp_path / "merged", dtype=torch.float32).eval()(input_ids=tokens).logits
    assert torch.allclose(merged, expected, atol=2e-2)


@pytest.mark.parametrize("name", ["qwen-moe", "mixtral"])
def test_in_a_mixture_of_experts_attention_has_the_adapter_and_peft_reads_it(root, tmp_path, name):
    make_model(root, name)
    run_on(at_most(2), root, init_from=name, steps=1, deterministic=False, **LORA)
    lines = run(root, init_from=name, steps=2, deterministic=False, **LORA)
    assert lines[1]["loss"] < lines[0]["loss"]
    weights = {key for key in ckptool.open_checkpoint(root / "step-2").tensors if key.startswith("model.")}
    assert {key.split(".")[5] for key in weights} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    ckptool.export("step-2", root=root, out=tmp_path / "adapter", adapter="folder")
    ckptool.export(name, root=root, out=tmp_path / "plain")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    own = {key for key, parameter in loaded.named_parameters() if "lora_" in key and parameter.abs().sum() > 0}
    assert len(own) == len(weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 0}, "step-6 holds an adapter of rank 4, no whole model"),
        ({"lora_rank": 8}, r"another one: rank 4 -> 8; alpha 8.0 -> 16.0"),
        ({"lora_targets": "q_proj"}, r"targets all-linear -> q_proj"),
        ({"init_from": "other"}, "not what the adapter was trained on: the weights of base were others"),
        ({"resume": "never", "init_from": "step-6"}, "step-6 is an adapter itself"),
    ],
)
def test_what_does_not_belong_to_the_adapter_is_refused(adapted, changes, message):
    if not (adapted / "other").exists():
        make_base(adapted / "other", dtype=torch.float32)
    with pytest.raises(MismatchError, match=message):
        run(adapted, **{**LORA, "steps": 8} | changes)


def test_what_is_said_of_weights_is_of_those_that_are_trained(root, capsys):
    run(root, **{**LORA, "steps": 1})
    said = capsys.readouterr().err
    assert f"training an adapter on the weights of {root / 'base'}" in said
    assert "are trained as" not in said


def test_a_run_of_all_weights_does_not_go_on_with_an_adapter(root):
    run(root, steps=1)
    with pytest.raises(MismatchError, match="of a run that trains all weights"):
        run(root, **{**LORA, "steps": 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_targets": "q_proj,qproj"}, "has no layer qproj"),
        ({"lora_targets": "embed_tokens"}, "embed_tokens is no linear layer inside of a block"),
        ({"lora_targets": "lm_head"}, "lm_head is no linear layer inside of a block"),
        ({"lora_targets": "input_layernorm"}, "--lora-targets input_layernorm: Target module"),
        ({"tp": 2}, "can't be had with --tp"),
        ({"lora_rank": 0, "lora_alpha": 8}, "say nothing without --lora-rank"),
    ],
)
def test_targets_and_options_that_can_not_be_are_refused(root, changes, message):
    with pytest.raises(UsageError, match=message):
        if changes.get("tp"):
            tiny_config(root, **LORA | changes).check(num_data_ranks=1)
        run(root, **LORA | changes)


@pytest.fixture(scope="module")
def imported(pristine, tmp_path_factory):
    """A root with `start`: the base with an adapter that peft has made beside it."""
    root = shutil.copytree(pristine, tmp_path_factory.mktemp("imported") / "root")
    ckptool.export("base", root=root, out=root / "hub")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(PARTS), init_lora_weights=False)
    peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(root / "hub"), settings).save_pretrained(
        root / "peft"
    )
    ckptool.import_hf(str(root / "hub"), "start", root=root, adapter=str(root / "peft"))
    return root


def test_an_imported_adapter_is_where_training_begins(imported, tmp_path):
    root = shutil.copytree(imported, tmp_path / "root")
    run(root, steps=1, init_from="start", **LORA | {"lr": 1e-30})
    ckptool.export("step-1", root=root, adapter="folder", out=tmp_path / "out")
    before, after = (load_file(path / "adapter_model.safetensors") for path in (root / "peft", tmp_path / "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    run(root, steps=2, init_from="start", **LORA)
    ckptool.export("step-2", root=root, adapter="merge", out=tmp_path / "merged")
    merged, plain = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", root / "hub"))
    assert merged.keys() == plain.keys()


UNEVEN = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 20}, "use_rslora": True}


def test_an_imported_adapter_of_uneven_layers_is_trained_with_peft_s_numbers(imported, tmp_path):
    """Ranks and alphas of some layers' own, divided by the root of the rank."""
    root = shutil.copytree(imported, tmp_path / "root")
    torch.manual_seed(2)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(PARTS), init_lora_weights=False, **UNEVEN)
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(root / "hub"), settings)
    theirs.save_pretrained(root / "uneven-peft")
    ckptool.import_hf(str(root / "hub"), "uneven", root=root, adapter=str(root / "uneven-peft"))
    tokens = torch.arange(40).view(2, 20) * 6
    expected = theirs.float().eval()(input_ids=tokens).logits.detach()
    run(root, steps=1, init_from="uneven", **LORA | {"lr": 1e-30})
    ckptool.export("step-1", root=root, adapter="folder", out=tmp_path / "out")
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain = load(root / "hub", dtype=torch.float32).eval()
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "out").eval()
    assert torch.allclose(again(input_ids=tokens).logits, expected, atol=1e-5)

    run(root, steps=3, init_from="uneven", **LORA)  # goes on with step-1
    assert ckptool.open_checkpoint(root / "step-3").provenance.adapter["config"]["rank_pattern"] == {"down_proj": 2}
    with parallel.joined_ranks("cpu") as ranks:
        config = tiny_config(root, steps=4, init_from="uneven", **LORA)
        origin = find_origin(config)
        position = ckptool.DataPosition.from_json((root / "step-3" / "data_position.json").read_text(), "step-3")
        state = build_state(config, ranks, origin, position)
        checkpoint.resume(state, origin, Log(root, rank=0))
        trained = state.model.eval()(input_ids=tokens).logits.detach()
    assert (trained - expected).abs().max() > 1e-2
    ckptool.export("step-3", root=root, adapter="merge", out=tmp_path / "merged")
    merged = load(tmp_path / "merged", dtype=torch.float32).eval()  # rounded to the base's bf16
    assert torch.allclose(merged(input_ids=tokens).logits, trained, atol=3e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 0}, "start holds an adapter of rank 4, unmerged"),
        ({"lora_rank": 2}, "another one: rank 4 -> 2"),
        ({"lora_targets": "q_proj"}, "beside other layers"),
    ],
)
def test_another_adapter_does_not_begin_from_an_imported_one(imported, tmp_path, changes, message):
    with pytest.raises(MismatchError, match=message):
        run(shutil.copytree(imported, tmp_path / "root"), **{**LORA, "steps": 1, "init_from": "start"} | changes)
