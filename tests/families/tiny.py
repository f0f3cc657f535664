"""A tiny random model of any transformers model type: its own default config, shrunk, with unequal sizes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

#: What common size attributes become. Unequal wherever a model allows it, so that a swapped dim can't go unseen.
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "vocab_size_per_layer_input": 99,
    "hidden_size": 48,
    "d_model": 48,
    "n_embd": 48,
    "dim": 48,
    "emb_dim": 48,
    "embed_dim": 48,
    "word_embed_proj_dim": 48,
    "embedding_size": 48,
    "intermediate_size": 80,
    "ffn_dim": 80,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "d_ff": 80,
    "n_inner": 80,
    "ffn_hidden_size": 80,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 6,
    "n_head": 6,
    "n_heads": 6,
    "num_heads": 6,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "num_key_value_heads": 2,
    "multi_query_group_num": 2,
    "head_dim": 8,
    "d_kv": 8,
    "kv_channels": 8,
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "moe_num_experts": 5,
    "num_experts_per_tok": 2,
    "top_k": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "qk_head_dim": 20,
    "v_head_dim": 10,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "projection_dim": 24,
    "state_size": 8,
    "time_step_rank": 4,
    "num_mel_bins": 16,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 8,
}

#: Lists with one entry a layer.
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "sliding_window_pattern")

#: Attributes that a shrunk config of one type needs besides, where the rule above can't know.
EXTRA: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 12, "head_dim": 8, "n_groups": 2, "expand": 2},
    "falcon": {"new_decoder_architecture": False, "multi_query": True},
    "gpt_neox": {"num_key_value_heads": None},
    "gemma3_text": {"layer_types": None},
}


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A config of the same class with the sizes above, sub-configs included. Raises whatever the class refuses."""
    record = config.to_dict()
    small = _shrink_dict(record)
    for key in list(record):
        if isinstance(getattr(config, key, None), PretrainedConfig):
            small[key] = shrink(getattr(config, key)).to_dict()
    small.update(EXTRA.get(config.model_type, {}))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        if isinstance(small.get(key), int) and small[key] >= SIZES["vocab_size"]:
            small[key] = 1
    for key in ("architectures", "transformers_version", "model_type", "dtype"):
        small.pop(key, None)
    return type(config)(**small)


def _shrink_dict(record: dict[str, Any]) -> dict[str, Any]:
    small = dict(record)
    for key, value in record.items():
        if type(value) is int:
            small[key] = SIZES.get(key, value)
        elif key in PER_LAYER and isinstance(value, list):
            small[key] = (value * 2)[: SIZES["num_hidden_layers"]]
    return small


def model_class(model_type: str) -> type[PreTrainedModel] | None:
    """The class that people download most for this type: the language-model head where there is one."""
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    ):
        name = mapping.get(model_type)
        name = name[0] if isinstance(name, list | tuple) else name
        found = getattr(transformers, name, None) if name else None
        if found is not None:
            return found
    return None


def build(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The tiny model, seeded. Raises whatever keeps transformers from building it."""
    config = shrink(transformers.CONFIG_MAPPING[model_type]())
    found = model_class(model_type)
    if found is None:
        raise ValueError("no model class")
    torch.manual_seed(sum(map(ord, model_type)))
    with contextlib.suppress(AttributeError):
        config._attn_implementation = "eager"
    model = found._from_config(config) if hasattr(found, "_from_config") else found(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(torch.randn_like(parameter, dtype=torch.float32))
    return model.to(dtype)
