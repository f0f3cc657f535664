"""OLMo-core's names, for OLMo 2 and 3, Llama and Qwen 3. Its RoPE turns the same rows as transformers'.

Source: nn/hf/convert.py of https://github.com/allenai/OLMo-core.
"""

from __future__ import annotations

from ckptool.naming.name_table import Dialect, Row

_LIVE = "model.layers.{}."
_THEIRS = "blocks.{}."


def _rows(pairs: dict[str, str]) -> tuple[Row, ...]:
    """Rows of a layer."""
    return tuple(Row(f"{_LIVE}{live}.weight", (f"{_THEIRS}{theirs}.weight",)) for live, theirs in pairs.items())


_COMMON = (
    Row("model.embed_tokens.weight", ("embeddings.weight",)),
    Row("model.norm.weight", ("lm_head.norm.weight",)),
    Row("lm_head.weight", ("lm_head.w_out.weight",)),
    *_rows(
        {
            "self_attn.q_proj": "attention.w_q",
            "self_attn.k_proj": "attention.w_k",
            "self_attn.v_proj": "attention.w_v",
            "self_attn.o_proj": "attention.w_out",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.down_proj": "feed_forward.w2",
            "mlp.up_proj": "feed_forward.w3",
        }
    ),
)

_NORMS_OF_HEADS = _rows({"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"})

_NORMS_BEFORE = _rows({"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"})

_NORMS_AFTER = _rows({"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "feed_forward_norm"})

_OLMO = (*_COMMON, *_NORMS_OF_HEADS, *_NORMS_AFTER)

DIALECT = Dialect(
    name="olmo_core",
    marks=("embeddings.weight", "blocks.0.attention.w_q.weight"),
    tables={
        "olmo2": _OLMO,
        "olmo3": _OLMO,
        "llama": (*_COMMON, *_NORMS_BEFORE),
        "qwen3": (*_COMMON, *_NORMS_OF_HEADS, *_NORMS_BEFORE),
    },
    keys=("model",),
)
