"""Tiny random models with unequal sizes everywhere, saved as Hugging Face folders by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(tied: bool = True, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **sizes}, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).to(dtype)


def mixtral(dtype: torch.dtype = torch.float32) -> transformers.MixtralForCausalLM:
    """Experts are fused live and separate on the Hub: transformers converts many tensors to one and back."""
    torch.manual_seed(1)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config).to(dtype)


def save_folder(model: transformers.PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> Path:
    """`save_pretrained` plus side files of the kinds that people keep beside weights."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}\n')
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "assets").mkdir()
    (folder / "assets" / "notes.bin").write_bytes(bytes(range(256)))
    return folder
