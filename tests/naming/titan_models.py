"""torchtitan's own models, tiny, and transformers' configs of the same models. Needs torchtitan installed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers

from tests.interop.absent import doing_without
from tests.tiny_models import SIZES

NUM_EXPERTS, EXPERT_SIZE = 4, 32


def config_of(kind: str, **changes: Any) -> transformers.PretrainedConfig:
    """transformers' config of the model that `build(kind)` builds with torchtitan."""
    sizes = {**SIZES, "tie_word_embeddings": False, "rope_theta": 10000.0, **changes}
    moe = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_SIZE}
    if kind == "llama":
        return transformers.LlamaConfig(**sizes, rms_norm_eps=1e-5)
    if kind == "qwen3":
        return transformers.Qwen3Config(**sizes)
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**sizes, **moe, norm_topk_prob=True)
    return transformers.DeepseekV3Config(
        **{key: value for key, value in sizes.items() if key not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=6,
        moe_intermediate_size=EXPERT_SIZE,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        q_lora_rank=20,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        rms_norm_eps=1e-5,
    )


def build(kind: str, tied: bool = False, fused: bool = True) -> Any:
    """torchtitan's model with random weights, norms included. The kernels, for GPUs, want triton."""
    with doing_without("torchtitan.distributed.minimal_async_ep.kernels"):
        from torchtitan.models import common

    dim, vocab = SIZES["hidden_size"], SIZES["vocab_size"]
    init = functools.partial(torch.nn.init.normal_, std=0.5)
    with_eps = {"eps": 1e-6} if kind.startswith("qwen3") else {"eps": 1e-5}
    weights = {"weight": init, "bias": init}
    config = _class(kind).Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=tied,
        tok_embeddings=common.Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=weights),
        norm=common.RMSNorm.Config(normalized_shape=dim, param_init=weights, **with_eps),
        lm_head=common.Linear.Config(in_features=dim, out_features=vocab, param_init=weights),
        layers=_layers(kind, fused, weights),
    )
    torch.manual_seed(3)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "rope" not in name and tensor.is_floating_point():
                tensor.normal_(std=0.3)
    for name, module in model.named_modules():
        if kind == "qwen3_moe" and hasattr(module, "expert_bias_E"):
            module.expert_bias_E.zero_()  # transformers' model has none
        if kind == "deepseek_v3" and name.endswith((".q_norm", ".kv_norm")):
            module.eps = 1e-6  # transformers' model has it fixed
    return model


def _class(kind: str) -> Any:
    if kind == "llama":
        from torchtitan.models.llama3 import Llama3Model as found
    elif kind == "deepseek_v3":
        from torchtitan.models.deepseek_v3 import DeepSeekV3Model as found
    else:
        from torchtitan.models.qwen3 import Qwen3Model as found
    return found


def _layers(kind: str, fused: bool, weights: dict[str, Any]) -> list[Any]:
    sizes = {"n_layers": 2, "dim": SIZES["hidden_size"], "n_heads": 6, "attn_backend": "flex"}
    if kind == "llama":
        from torchtitan.models import llama3

        rope = llama3.ComplexRoPE.Config(dim=8, max_seq_len=64, theta=10000.0, scaling="none")
        return llama3._build_llama3_layers(**sizes, n_kv_heads=2, hidden_dim=80, fuse_qkv=fused, rope=rope)
    if kind == "deepseek_v3":
        import torchtitan.models.deepseek_v3 as deepseek

        experts = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), weights["weight"])
        return deepseek.build_mla_moe_layers(
            **sizes,
            n_dense_layers=1,
            q_lora_rank=20,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
            mscale=1.0,
            dense_hidden_dim=80,
            moe_hidden_dim=EXPERT_SIZE,
            num_experts=NUM_EXPERTS,
            num_shared_experts=1,
            router_top_k=2,
            router_score_func="sigmoid",
            router_route_scale=1.5,
            router_route_norm=True,
            moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            linear_init=weights,
            norm_init=weights,
            depth_init=lambda layer: weights,
            depth_experts_init=lambda layer: experts,
            rope=deepseek.ComplexRoPE.Config(dim=8, max_seq_len=64, theta=10000.0, scaling="none"),
        )
    from torchtitan.models import qwen3

    attention = {"n_kv_heads": 2, "head_dim": 8, "fuse_qkv": fused}
    rope = qwen3.CosSinRoPE.Config(dim=8, max_seq_len=64, theta=10000.0)
    if kind == "qwen3":
        return qwen3._build_qwen3_layers(**sizes, **attention, hidden_dim=80, rope=rope)
    moe = {"moe_hidden_dim": EXPERT_SIZE, "num_experts": NUM_EXPERTS, "top_k": 2, "moe_comm_backend": "standard"}
    return qwen3._build_qwen3_moe_layers(**sizes, **attention, **moe, rope=rope)


def save_checkpoint(model: Any, path: Path) -> Path:
    """What torchtitan's checkpointer saves: the model's tensors bare, the rest beside them."""
    from torchtitan.components.checkpointer.base import ModelWrapper

    state = ModelWrapper(model).state_dict()
    optimizer = {f"state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in state.items()}
    beside = {"optimizer": optimizer, "lr_scheduler": {"last_epoch": 3}, "train_state": {"step": torch.tensor(3)}}
    dcp.save({**state, **beside}, checkpoint_id=path, no_dist=True)
    return path


def load_checkpoint(model: Any, path: Path) -> None:
    """As torchtitan loads a model alone, strictly."""
    from torchtitan.components.checkpointer.base import ModelWrapper

    wrapper = ModelWrapper(model)
    state = wrapper.state_dict()
    dcp.load(state, checkpoint_id=path, no_dist=True)
    wrapper.load_state_dict(state)


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1])[None]
    torch.compiler.set_stance("force_eager")
    try:
        return model(tokens, positions, model.get_attention_masks(positions=positions))
    finally:
        torch.compiler.set_stance("default")
