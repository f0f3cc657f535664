"""torchtune's names, for Llama, Mistral and Qwen 2 and 2.5.

Source: convert_weights.py and qwen2/_convert_weights.py of https://github.com/pytorch/torchtune/tree/main/torchtune/models.
Llama's and Mistral's RoPE turns neighbours as pairs; Qwen's is transformers'.
"""

from __future__ import annotations

from ckptool.naming.name_table import Dialect, PairedRows, Row

_LIVE = "model.layers.{}."
_THEIRS = "layers.{}."

_COMMON = (
    Row("model.embed_tokens.weight", ("tok_embeddings.weight",)),
    Row("model.norm.weight", ("norm.scale",)),
    Row("lm_head.weight", ("output.weight",)),
    *(
        Row(_LIVE + live, (_THEIRS + theirs,))
        for live, theirs in {
            "input_layernorm.weight": "sa_norm.scale",
            "post_attention_layernorm.weight": "mlp_norm.scale",
            "self_attn.v_proj.weight": "attn.v_proj.weight",
            "self_attn.o_proj.weight": "attn.output_proj.weight",
            "mlp.gate_proj.weight": "mlp.w1.weight",
            "mlp.down_proj.weight": "mlp.w2.weight",
            "mlp.up_proj.weight": "mlp.w3.weight",
        }.items()
    ),
)

_LLAMA = (
    *_COMMON,
    Row(_LIVE + "self_attn.q_proj.weight", (_THEIRS + "attn.q_proj.weight",), PairedRows("num_attention_heads")),
    Row(_LIVE + "self_attn.k_proj.weight", (_THEIRS + "attn.k_proj.weight",), PairedRows("num_key_value_heads")),
)

_QWEN2 = (
    *_COMMON,
    *(Row(f"{_LIVE}self_attn.{part}_proj.weight", (f"{_THEIRS}attn.{part}_proj.weight",)) for part in "qk"),
    *(Row(f"{_LIVE}self_attn.{part}_proj.bias", (f"{_THEIRS}attn.{part}_proj.bias",)) for part in "qkv"),
)

DIALECT = Dialect(
    name="torchtune",
    marks=("tok_embeddings.weight", "layers.0.sa_norm.scale"),
    tables={"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _QWEN2},
    keys=("model",),
)
