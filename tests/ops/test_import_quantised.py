"""Quantised models: what is imported are the weights that the numbers stand for, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ckptool
from ckptool.errors import CkptoolError, DamagedError, MismatchError, UnsupportedError
from tests.quantised_models import quantise_folder, save_shards, set_config
from tests.tiny_models import SIZES, llama, mixtral, save_folder


def block_fp8(block: tuple[int, int]) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}


def exported(root: Path, name: str = "base") -> dict[str, torch.Tensor]:
    ckptool.export(name, root=root)
    return {n: t for file in (root / f"{name}-hf").glob("*.safetensors") for n, t in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("block", [(16, 16), (10, 7), (1, 32), (128, 128)])
def test_weights_in_blocks_of_any_size(tmp_path: Path, block: tuple[int, int]) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    plain = quantise_folder(folder, block, block_fp8(block))
    result = ckptool.import_hf(str(folder), "base", root=tmp_path, chunk_bytes=700)
    assert any("quantised with fp8: dequantised to bfloat16" in note for note in result.notes)
    assert_equal(exported(tmp_path), plain)


@pytest.mark.parametrize("model", [llama, mixtral])
@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_the_same_weights_as_transformers_gives(tmp_path: Path, model: Any, dtype: str) -> None:
    made = model(dtype=torch.bfloat16)
    folder = save_folder(made, tmp_path / "model")
    quantise_folder(folder, (16, 16), block_fp8((16, 16)))
    ckptool.import_hf(str(folder), "base", root=tmp_path, dtype=dtype)
    exported(tmp_path)
    wanted = torch.float32 if dtype == "fp32" else torch.bfloat16
    reference = type(made).from_pretrained(
        folder, dtype=wanted, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    ours = type(made).from_pretrained(tmp_path / "base-hf")
    # Some versions of transformers leave what was not quantised as it is stored.
    assert_equal(ours.state_dict(), {name: tensor.to(wanted) for name, tensor in reference.state_dict().items()})


def test_the_config_of_an_export_says_what_is_there(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    before = json.loads((folder / "config.json").read_text())
    quantise_folder(folder, (16, 16), block_fp8((16, 16)))
    ckptool.import_hf(str(folder), "base", root=tmp_path, dtype="fp32")
    result = ckptool.export("base", root=tmp_path)
    assert "the source was quantised with fp8; these weights are not" in result.notes
    config = json.loads((tmp_path / "base-hf" / "config.json").read_text())
    assert config == {**before, "dtype": "float32"}
    ckptool.export("base", root=tmp_path, out=tmp_path / "bf16", dtype="bf16")
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == before


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "fp8", "activation_scheme": "static"},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}},
        },
    ],
)
def test_one_scale_a_tensor_and_scales_of_activations(tmp_path: Path, quantisation: dict[str, Any]) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    plain = quantise_folder(folder, None, quantisation, "_scale")
    save_shards(folder, [load_file(file) for file in sorted(folder.glob("*.safetensors"))])
    extra = {"model.layers.0.self_attn.q_proj.input_scale": torch.tensor(0.5)}
    shards = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    save_shards(folder, [{**shards[0], **extra}, shards[1]])
    result = ckptool.import_hf(str(folder), "base", root=tmp_path)
    assert any("q_proj.input_scale" in note for note in result.notes)
    assert_equal(exported(tmp_path), plain)


def gpt_oss(dtype: torch.dtype = torch.bfloat16) -> transformers.GptOssForCausalLM:
    torch.manual_seed(3)
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).to(dtype)


def pack_experts(folder: Path) -> dict[str, torch.Tensor]:
    """Random MXFP4 experts in place of a gpt-oss model's, every byte and usual scale; returns the weights."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    plain = dict(tensors)
    torch.manual_seed(4)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, blocks.shape[:-1], dtype=torch.uint8)
        tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    scale_names = [n for n in tensors if n.endswith("_scales")]
    save_shards(
        folder, [{n: t for n, t in tensors.items() if n not in scale_names}, {n: tensors[n] for n in scale_names}]
    )
    set_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    folder = save_folder(gpt_oss(), tmp_path / "model")
    plain = pack_experts(folder)
    ckptool.import_hf(str(folder), "base", root=tmp_path, chunk_bytes=5000)
    assert_equal(exported(tmp_path), plain)
    tokens = torch.arange(2, 14).view(1, -1)
    ours = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "base-hf", dtype=torch.bfloat16)
    reference = transformers.GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    assert torch.equal(ours(tokens).logits, reference(tokens).logits)


def test_a_quantised_folder_can_be_compared(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    quantise_folder(folder, (16, 16), block_fp8((16, 16)))
    ckptool.import_hf(str(folder), "base", root=tmp_path)
    assert ckptool.diff(str(folder), str(tmp_path / "base")).equal


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "bitsandbytes", "hqq", "eetq", "aqlm", "quanto", "torchao", "fbgemm_fp8", None, 5, {}]
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, method: Any) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    set_config(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedError, match=str(method)):
        ckptool.import_hf(str(folder), "base", root=tmp_path / "root")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"format": "pack-quantized"},
        {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}},
        {"sparsity_config": {"format": "sparse-24"}},
        {"config_groups": []},
    ],
)
def test_other_forms_of_compressed_tensors_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}
    whole = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups, **change}
    quantise_folder(folder, None, whole, "_scale")
    with pytest.raises(UnsupportedError, match="compressed-tensors"):
        ckptool.import_hf(str(folder), "base", root=tmp_path)


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({f"{Q}_scale_inv": torch.ones(2, 3)}, DamagedError, "doesn't fit"),
        ({f"{Q}_scale_inv": None}, UnsupportedError, f"without scales: {Q}"),
        ({f"{Q}_scale": torch.ones(3, 3)}, DamagedError, "scales twice"),
        ({"model.absent.weight_scale_inv": torch.ones(3, 3)}, DamagedError, "not there"),
        ({"model.norm.weight_scale_inv": torch.ones(3)}, UnsupportedError, "model.norm.weight of dtype bfloat16"),
        ({f"{Q}_scale_inv": torch.ones(3, 3, dtype=torch.uint8)}, UnsupportedError, "scales of uint8"),
    ],
)
def test_scales_that_do_not_belong(
    tmp_path: Path, change: dict[str, Any], error: type[CkptoolError], says: str
) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    quantise_folder(folder, (16, 16), block_fp8((16, 16)))
    weights, scales = (load_file(file) for file in sorted(folder.glob("*.safetensors")))
    save_shards(folder, [weights, {n: t for n, t in {**scales, **change}.items() if t is not None}])
    with pytest.raises(error, match=says):
        ckptool.import_hf(str(folder), "base", root=tmp_path / "root")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("size", [[16], [16, 0], "16x16", [16.0, 16]])
def test_block_sizes_that_mean_nothing(tmp_path: Path, size: Any) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    quantise_folder(folder, (16, 16), {"quant_method": "fp8", "weight_block_size": size})
    with pytest.raises(UnsupportedError, match="blocks of"):
        ckptool.import_hf(str(folder), "base", root=tmp_path)


def test_packed_experts_need_scales_that_fit(tmp_path: Path) -> None:
    folder = save_folder(gpt_oss(), tmp_path / "model")
    pack_experts(folder)
    weights, scales = (load_file(file) for file in sorted(folder.glob("*.safetensors")))
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_shards(folder, [weights, {**scales, name: scales[name][:, 1:].clone()}])
    with pytest.raises(DamagedError, match="down_proj_scales that fits"):
        ckptool.import_hf(str(folder), "base", root=tmp_path)


def test_a_weight_too_large_for_its_dtype(tmp_path: Path) -> None:
    folder = save_folder(llama(dtype=torch.float16), tmp_path / "model")
    quantise_folder(folder, (16, 16), block_fp8((16, 16)))
    weights, scales = (load_file(file) for file in sorted(folder.glob("*.safetensors")))
    save_shards(folder, [weights, {**scales, f"{Q}_scale_inv": torch.full((3, 3), 1e6)}])
    for dtype in ("keep", "fp16"):
        with pytest.raises(MismatchError, match="too large for float16"):
            ckptool.import_hf(str(folder), "base", root=tmp_path, dtype=dtype)
    save_file(weights, folder / "unused.safetensors")
    ckptool.import_hf(str(folder), "base", root=tmp_path, dtype="bf16")
