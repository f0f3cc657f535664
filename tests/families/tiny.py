"""A tiny random model of any transformers model type: its own default config, shrunk, with unequal sizes."""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
from collections.abc import Collection
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

_PP_OCR: dict[str, Any] = {
    "kernel_list": [3, 2, 2],
    "neck_out_channels": 32,
    "intraclass_block_config": {
        f"{way}_{ratio}ratio": [1, 1, 0]
        for way in ("vertical_long_to_small_conv", "horizontal_small_to_long_conv", "symmetric_conv_long")
        for ratio in ("long", "mid", "short")
    }
    | {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]},
}

#: Attributes that a shrunk config of one type needs besides, where the rule above can't know.
EXTRA: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 12, "head_dim": 8, "n_groups": 2, "expand": 2},
    "falcon": {"new_decoder_architecture": False, "multi_query": True},
    "gpt_neox": {"num_key_value_heads": None},
    "gemma3_text": {"layer_types": None},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 16}},
    },
    "bamba": {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_n_groups": 2},
    "granitemoehybrid": {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_n_groups": 2, "layer_types": None},
    "deepseek_v3": {"num_key_value_heads": 6},
    "qwen2_5_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "nemotron": {"num_key_value_heads": 2},
    "ministral": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 2},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    # The rest is sorted by what stands in the way: ids that must lie in the vocabulary, sizes of one part that must fit
    # those of another, what has no default, and parts that are large whatever their layers are.
    "apertus1p5": {"image_token_offset": 10, "audio_token_offset": 50},
    "blt": {"encoder_hash_byte_group_vocab": 90},
    "csm": {"codebook_pad_token_id": 98, "text_vocab_size": 97},
    "esm": {"vocab_size": 99, "mask_token_id": 4, "pad_token_id": 1},
    "inkling2_text": {"unpadded_vocab_size": 95, "n_layers_per_attn_res_block": 1},
    "inkling2_loop_text": {
        **{"unpadded_vocab_size": 95, "n_layers_per_attn_res_block": 1},
        **{"num_hidden_layers": 3, "loop_layer_index_start": 1, "loop_layer_index_end": 2},
        **{"layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"]},
    },
    "kyutai_speech_to_text": {"num_codebooks": 4, "codebook_vocab_size": 20, "audio_pad_token_id": 99 + 4 * 20},
    "bridgetower": {"hidden_size": 128, "num_attention_heads": 4},
    "bridgetower_text_model": {"hidden_size": 128, "num_attention_heads": 4},
    "bridgetower_vision_model": {"hidden_size": 128},
    "deformable_detr": {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "dia_decoder": {"num_channels": 9},
    "dots3_note_audio_encoder": {"adapter_input_size": 48, "num_key_value_heads": 6},
    "dots3_note": {"audio_config": {"adapter_out_dim": 48}, "vision_config": {"adapter_out_dim": 48}},
    "dots3_note_text": {
        **{"layer_types": ["indexed_attention", "sliding_attention"], "num_key_value_heads": 6, "head_dim": 24},
        "per_layer_config": {
            "1": {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16}
        },
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 48, "adapter_out_dim": 48},
    "esmc": {"num_key_value_heads": 6},
    "fast_vlm": {"vision_config": {"architecture": "fastvit_t8"}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 12}},
    "glm5_next_text": {"num_key_value_heads": 6, "qk_rope_head_dim": 0, "head_dim": 0},
    "granite_docling": {"vision_config": {"out_hidden_size": 48, "deepstack_visual_indexes": [0, 1]}},
    "granite_speech5_encoder": {"context_size": 16, "num_key_value_heads": 6},
    "hunyuan_vl_text": {"head_dim": 8},
    "hunyuan_vl": {"vision_config": {"out_hidden_size": 48, "text_hidden_size": 48}},
    "inkling2": {"vision_config": {"text_hidden_size": 48}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 48}},
    "kosmos_2_text_model": {"layers": 2, "attention_heads": 6},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 48}},
    "moonshine_streaming": {"num_key_value_heads": 6},
    "muse_spark": {"audio_config": {"out_hidden_size": 48}},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 98, "num_key_value_heads": 6},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 6},
    "nemotron3_diarization_audio": {"num_key_value_heads": 6},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 48}},
    "wavtokenizer": {"codebook_dim": 48, "decoder_attention_num_groups": 6},
    "wavtokenizer_encoder": {"codebook_dim": 48, "codebook_size": 16},
    "autoformer": {"prediction_length": 6, "context_length": 12},
    "informer": {"prediction_length": 6, "context_length": 12},
    "time_series_transformer": {"prediction_length": 6, "context_length": 12},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "diffusion_gemma_text": {
        **{"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40},
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 16}},
    },
    "esmfold2": {"single_inputs_size": 48 + 2 * 33 + 1},
    "EsmFold2AtomEncoderConfig": {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "output_dim": 48},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "granite4_vision": {
        "vision_config": {"hidden_size": 128, "num_attention_heads": 4},
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0], [1, 1]],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "neomme": {"layer_types": ["sliding_attention", "full_attention"]},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_tiny_patch16_224",
            "model_args": {"embed_dim": 48, "num_heads": 3, "depth": 2},
        }
    },
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 56},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_embds_dim": [16, 32]},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "timm_backbone": {"backbone": "resnet10t"},
    **dict.fromkeys(("pp_ocrv5_server_det", "pp_ocrv6_medium_det"), _PP_OCR),
    "pix2struct_text_model": {"initializer_range": 0.02},
    "videoprism_vision_model": {"tubelet_size": [1, 4, 4]},
    "apertus1p5_vision_tokenizer": {"base_channels": 32, "codebook_size": 40},
    "chameleon_vqgan": {"base_channels": 32, "num_embeddings": 70},
    "dory": {
        **{"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
        **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    },
    "emu3_vqgan": {"base_channels": 32, "codebook_size": 70},
    "gemma3n_vision": {"architecture": "resnet10t"},
    "mimi": {
        **{"num_filters": 8, "upsample_groups": 48, "num_key_value_heads": 6, "codebook_size": 64},
        **{"codebook_dim": 24, "vector_quantization_hidden_dimension": 24, "num_quantizers": 8},
    },
    "neucodec": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "quantization_dim": 112},
    "xcodec2": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "quantization_dim": 112},
    "timm_wrapper": {"architecture": "resnet10t"},
    "vibevoice_acoustic_tokenizer": {"num_filters": 2, "downsampling_ratios": [2, 2], "depths": [1, 1, 2]},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "downsampling_ratios": [2, 2], "depths": [1, 1, 2]},
}

#: What the config itself must be told to be one, of types whose own defaults contradict each other.
STARTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            **{"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
            **{"num_hidden_layers": 2, "num_kv_shared_layers": 2},
            **{"layer_types": ["sliding_attention", "full_attention"]},
        }
    },
    "gemma4_unified_assistant": {
        "text_config": {
            **{"model_type": "gemma4_unified_text", "num_hidden_layers": 2, "num_kv_shared_layers": 2},
            **{"layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {"1": {"head_dim": 16}}},
        }
    },
}


#: The numbers of layers.
DEPTHS = tuple(key for key in SIZES if "layers" in key or key == "n_layer")

#: Which sizes are shrunk: all, or, where the class refuses such a config, fewer and fewer.
CHOICES = (
    tuple(SIZES),
    tuple(key for key in SIZES if "head" not in key),
    tuple(key for key in SIZES if key in DEPTHS or key.startswith("vocab") or "experts" in key),
    (),
)

#: What transformers works out itself, and what would contradict the layers that are left.
WORKED_OUT = ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices")

#: A tiny model has at most this many parameters; most have a hundredth.
MAX_PARAMETERS = 130_000_000


def shrink(config: PretrainedConfig, keys: Collection[str], with_nones: bool = True) -> PretrainedConfig:
    """A config of the same class with the sizes above, sub-configs included. Raises whatever the class refuses.

    `with_nones` hands on what the config's own class has as None, instead of leaving it to the class.
    """
    record = config.to_dict()
    small = _shrink_dict(record, keys)
    for key in list(record):
        part = vars(config).get(key)
        if isinstance(part, PretrainedConfig):
            small[key] = shrink(part, keys, with_nones).to_dict()
    if keys:
        _shrink_layer_configs(small)
        for key, value in EXTRA.get(config.model_type or type(config).__name__, {}).items():
            small[key] = small[key] | value if isinstance(value, dict) and isinstance(small.get(key), dict) else value
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        if isinstance(small.get(key), int) and "vocab_size" in keys and small[key] >= SIZES["vocab_size"]:
            small[key] = 1
    for key in ("architectures", "transformers_version", "model_type", "dtype", *WORKED_OUT):
        small.pop(key, None)
    return type(config)(**{key: value for key, value in small.items() if with_nones or value is not None})


def start(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """The config that is shrunk: what the class makes without a word, unless that can't be."""
    return config_class(**copy.deepcopy(STARTS.get(config_class.model_type, {})))


def _shrink_dict(record: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    small = dict(record)
    depths = {record[key] for key in DEPTHS if key in keys and type(record.get(key)) is int}
    for key, value in record.items():
        if type(value) is int and key in keys:
            small[key] = SIZES.get(key, value)
        elif isinstance(value, list) and keys and (key in PER_LAYER or len(value) in depths):
            small[key] = (value * 2)[: SIZES["num_hidden_layers"]]
    return small


def _shrink_layer_configs(small: dict[str, Any]) -> None:
    """Leave what is said of single layers for those that are left; of none of them, what is said of the last one."""
    of_layers = small.get("per_layer_config")
    if not isinstance(of_layers, dict) or not of_layers:
        return
    depth = SIZES["num_hidden_layers"]
    found = {key: value for key, value in of_layers.items() if int(key) < depth}
    small["per_layer_config"] = found or {str(depth - 1): list(of_layers.values())[-1]}


def model_class(model_type: str) -> type[PreTrainedModel] | None:
    """The class that people download most for this type: the language-model head where there is one."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    shared = None  # a class of another type, which some types use as it is
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
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if found is not None and found.config_class is config_class:
            return found
        shared = shared or found
    return _class_of_part(config_class) or shared


def _class_of_part(config_class: type[PretrainedConfig]) -> type[PreTrainedModel] | None:
    """The largest model of a config that no auto class knows: that of a part of another model."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
    found = [c for c in classes if issubclass(c, PreTrainedModel) and c.config_class is config_class]
    return max(found, key=lambda c: (hasattr(transformers, c.__name__), len(c.__mro__)), default=None)


def build(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The tiny model, seeded: of unequal sizes where its class allows that, else its usual ones in few layers.

    Raises whatever keeps transformers from building it, ValueError when it is not tiny even so.
    """
    found = model_class(model_type)
    if found is None:
        raise ValueError("no class of a model has this config")
    config = _smallest(found, transformers.CONFIG_MAPPING[model_type])
    torch.manual_seed(sum(map(ord, model_type)))
    model: Any = _of_config(found, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(torch.randn_like(parameter, dtype=torch.float32))
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0  # as it is in every trained model, and as transformers sets it
    return model.to(dtype)


def _smallest(found: type[PreTrainedModel], config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """The first config of those tried, the smallest first, that a model can be built of."""
    errors: list[Exception] = []
    for keys, with_nones in itertools.product(CHOICES, (True, False)):
        try:
            config = shrink(start(config_class), keys, with_nones)
            with torch.device("meta"):
                num_parameters = sum(parameter.numel() for parameter in _of_config(found, config).parameters())
        except Exception as error:  # whatever a class refuses a config with
            errors.append(error)
            continue
        if num_parameters <= MAX_PARAMETERS:
            return shrink(start(config_class), keys, with_nones)
        errors.append(ValueError(f"has {num_parameters / 1e6:.0f}M parameters when it is built as small as it gets"))
    raise errors[0]


def _of_config(found: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    with contextlib.suppress(AttributeError):
        config._attn_implementation = "eager"
    return found._from_config(config) if hasattr(found, "_from_config") else found(config)
