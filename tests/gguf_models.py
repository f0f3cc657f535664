"""Tiny models written as GGUF files, with the names, order and values that llama.cpp's converter gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
import transformers

Q8_0, Q4_0, BF16, F16, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "BF16", "F16", "F32"))

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def llama(tied: bool = False) -> transformers.LlamaForCausalLM:
    torch.manual_seed(5)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied))


def gemma2() -> transformers.Gemma2ForCausalLM:
    """Its norms are stored plus one."""
    torch.manual_seed(6)
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(0, 0.1)
    return model


def qwen3_moe() -> transformers.Qwen3MoeForCausalLM:
    """Its experts are one tensor a projection; live, two of them are one. Only this width is known to transformers."""
    torch.manual_seed(7)
    sizes = {**SIZES, "num_experts": 3, "num_experts_per_tok": 2}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, tie_word_embeddings=False))


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    architecture: str,
    extra: dict[str, numpy.ndarray] | None = None,
    **more: Any,
) -> Path:
    """Matrices as Q8_0, norms as F32, and a vocabulary of made-up words.

    `extra` are further tensors, `more` further keys of the header (`__` for a dot).
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{i}" for i in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([1] * config.vocab_size)
    for key, value in more.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", "."), value)
    for name, tensor in {**stored_tensors(model, architecture), **(extra or {})}.items():
        kind = Q8_0 if tensor.ndim > 1 else F32
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_tensors(model: transformers.PreTrainedModel, architecture: str) -> dict[str, numpy.ndarray]:
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tied = set(model.all_tied_weights_keys)
    stored: dict[str, numpy.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        value = tensor.float().numpy()
        if name.endswith("experts.gate_up_proj"):
            base = names.get_name(name.removesuffix("gate_up_proj") + "gate_proj")
            assert base is not None
            gate, up = numpy.split(value, 2, axis=1)
            stored[f"{base}.weight"], stored[f"{base.replace('gate', 'up')}.weight"] = gate, up
            continue
        base, _, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            value = value.reshape(heads, 2, value.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
        if architecture == "gemma2" and "norm" in name:
            value = value + 1
        stored[f"{names.get_name(base)}.{suffix}"] = numpy.ascontiguousarray(value)
    return stored
