"""torchtitan's names, of version 0.3 and of before, for its models that transformers has too.

Source: the state_dict_adapter.py of each model, https://github.com/pytorch/torchtitan/tree/main/torchtitan/models.
Llama's RoPE is the complex one, whose pairs are neighbours; Qwen 3's is transformers'; DeepSeek's is the same in both.
"""

from __future__ import annotations

from ckptool.naming.name_table import Dialect, Joined, PairedRows, Row

_LIVE = "model.layers.{}."
_THEIRS = "layers.{}."


def _rows(pairs: dict[str, str]) -> tuple[Row, ...]:
    """Rows of a layer, without a form."""
    return tuple(Row(_LIVE + live, (_THEIRS + theirs,)) for live, theirs in pairs.items())


_COMMON = (
    Row("model.embed_tokens.weight", ("tok_embeddings.weight",)),
    Row("model.norm.weight", ("norm.weight",)),
    Row("lm_head.weight", ("lm_head.weight",)),
    Row("lm_head.weight", ("output.weight",)),
    *_rows(
        {
            "input_layernorm.weight": "attention_norm.weight",
            "post_attention_layernorm.weight": "ffn_norm.weight",
            "self_attn.o_proj.weight": "attention.wo.weight",
            "mlp.gate_proj.weight": "feed_forward.w1.weight",
            "mlp.down_proj.weight": "feed_forward.w2.weight",
            "mlp.up_proj.weight": "feed_forward.w3.weight",
        }
    ),
)

_VALUES = (
    Row(_LIVE + "self_attn.v_proj.weight", (_THEIRS + "attention.qkv_linear.wv.weight",)),
    Row(_LIVE + "self_attn.v_proj.weight", (_THEIRS + "attention.wv.weight",)),
)

_LLAMA = (
    *_COMMON,
    *_VALUES,
    *(
        Row(_LIVE + f"self_attn.{live}.weight", (_THEIRS + theirs,), PairedRows(heads))
        for live, short, heads in (("q_proj", "wq", "num_attention_heads"), ("k_proj", "wk", "num_key_value_heads"))
        for theirs in (f"attention.qkv_linear.{short}.weight", f"attention.{short}.weight")
    ),
)


def _expert_rows(w1: str, w2: str, w3: str) -> tuple[Row, ...]:
    return (
        Row(_LIVE + "mlp.experts.gate_up_proj", (_THEIRS + w1, _THEIRS + w3), Joined(1)),
        Row(_LIVE + "mlp.experts.down_proj", (_THEIRS + w2,)),
    )


_EXPERTS = (
    *_expert_rows(*(f"moe.routed_experts.inner_experts.{name}" for name in ("w1_EFD", "w2_EDF", "w3_EFD"))),
    *_expert_rows(*(f"moe.experts.{name}" for name in ("w1", "w2", "w3"))),
)

_ROUTER = ("mlp.gate.weight", "moe.router.gate.weight")

_QWEN3 = (
    *_COMMON,
    *_VALUES,
    *_rows(
        {
            "self_attn.q_proj.weight": "attention.qkv_linear.wq.weight",
            "self_attn.k_proj.weight": "attention.qkv_linear.wk.weight",
            "self_attn.q_norm.weight": "attention.q_norm.weight",
            "self_attn.k_norm.weight": "attention.k_norm.weight",
        }
    ),
    *_rows({"self_attn.q_proj.weight": "attention.wq.weight", "self_attn.k_proj.weight": "attention.wk.weight"}),
)

#: torchtitan balances the load of Qwen 3's experts too, by a bias that transformers' model doesn't have.
_UNBIASED_ROUTER = Row(_LIVE + _ROUTER[0], (_THEIRS + _ROUTER[1],), zeros=(_THEIRS + "moe.expert_bias_E",))

_DEEPSEEK = (
    *_COMMON,
    *_EXPERTS,
    *_rows(
        {
            _ROUTER[0]: _ROUTER[1],
            "self_attn.q_proj.weight": "attention.wq.weight",
            "self_attn.q_a_proj.weight": "attention.wq_a.weight",
            "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
            "self_attn.q_b_proj.weight": "attention.wq_b.weight",
            "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
            "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
            "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
            "mlp.shared_experts.gate_proj.weight": "moe.shared_experts.w1.weight",
            "mlp.shared_experts.down_proj.weight": "moe.shared_experts.w2.weight",
            "mlp.shared_experts.up_proj.weight": "moe.shared_experts.w3.weight",
            "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
        }
    ),
    *_rows({"mlp.gate.e_score_correction_bias": "moe.expert_bias"}),
)

DIALECT = Dialect(
    name="torchtitan",
    marks=("tok_embeddings.weight", "layers.0.attention_norm.weight"),
    tables={
        "llama": _LLAMA,
        "qwen3": _QWEN3,
        "qwen3_moe": (*_QWEN3, *_EXPERTS, _UNBIASED_ROUTER),
        "deepseek_v3": _DEEPSEEK,
    },
    left_out={
        r"^freqs_cis$|(^|\.)rope\.": "the model computes them",
        r"\.moe\.tokens_per_expert(_E)?$": "they count tokens while training",
        r"\.moe\.expert_bias(_E)?$": "transformers' model has none, so it may choose other experts where they aren't 0",
    },
)
