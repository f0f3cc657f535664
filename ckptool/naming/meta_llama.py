"""Meta's names for Llama -> live names: pieces joined, rows of queries and keys reordered; and the config they imply.

Meta's RoPE turns neighbouring rows of a head as a pair (`rope_rows.py`). Which dim the ranks split is that of the
layers in https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from ckptool.core.provenance import Naming
from ckptool.core.tensors import TensorEntry
from ckptool.errors import DamagedError, MismatchError, UnsupportedError, name_some
from ckptool.naming.groups import NameGroup, NamePlan
from ckptool.naming.meta_model import DtypeRule
from ckptool.naming.rope_rows import halves_apart
from ckptool.naming.transformers_names import SameBytes, settle_import

NAMING = "meta-llama"

#: Meta's name -> (live name, the dim that ranks split, None where each has all of it).
_TOP = {
    "tok_embeddings.weight": ("model.embed_tokens.weight", 0),
    "norm.weight": ("model.norm.weight", None),
    "output.weight": ("lm_head.weight", 0),
}
_LAYER = {
    "attention.wq.weight": ("self_attn.q_proj.weight", 0),
    "attention.wk.weight": ("self_attn.k_proj.weight", 0),
    "attention.wv.weight": ("self_attn.v_proj.weight", 0),
    "attention.wo.weight": ("self_attn.o_proj.weight", 1),
    "feed_forward.w1.weight": ("mlp.gate_proj.weight", 0),
    "feed_forward.w2.weight": ("mlp.down_proj.weight", 1),
    "feed_forward.w3.weight": ("mlp.up_proj.weight", 0),
    "attention_norm.weight": ("input_layernorm.weight", None),
    "ffn_norm.weight": ("post_attention_layernorm.weight", None),
}
_LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)")

#: A buffer that the model computes.
COMPUTED = "rope.freqs"

_LLAMA3_VOCAB_SIZE = 128256


def meta_config(params: Mapping[str, Any], pieces: Mapping[str, Sequence[TensorEntry]]) -> transformers.LlamaConfig:
    """The config of a model in Meta's form. Sizes are those of the tensors; the rest is in params.json.

    Raises DamagedError for params that can't be, UnsupportedError for a RoPE whose factor params.json doesn't say.
    """
    if params.get("use_scaled_rope"):
        raise UnsupportedError(
            "params.json says use_scaled_rope, and not by which factor (8 in Llama 3.1, 32 in 3.2)",
            hint="put the config.json of the model's Hub form beside it",
        )
    num_heads = _number(params, "n_heads", None, int)
    theta = _number(params, "rope_theta", 10000.0)
    dim = _size(pieces, "norm.weight", 0)
    is_tied = "output.weight" not in pieces
    vocab_size = _size(pieces, "tok_embeddings.weight" if is_tied else "output.weight", 0)
    num_layers = len({match[1] for name in pieces if (match := _LAYER_NAME.fullmatch(name))})
    if dim % num_heads or params.get("dim", dim) != dim or params.get("n_layers", num_layers) != num_layers:
        raise MismatchError(f"params.json is not that of these weights: {num_layers} layers of width {dim}")
    is_third = vocab_size == _LLAMA3_VOCAB_SIZE
    return transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=dim,
        intermediate_size=_size(pieces, "layers.0.feed_forward.w1.weight", 0),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=_number(params, "n_kv_heads", num_heads, int),
        rms_norm_eps=_number(params, "norm_eps", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=8192 if is_third else 16384 if theta > 10000 else 4096,
        bos_token_id=128000 if is_third else 1,
        eos_token_id=128001 if is_third else 2,
        tie_word_embeddings=is_tied,
    )


def plan_meta_import(
    model: transformers.PreTrainedModel,
    pieces: Mapping[str, Sequence[TensorEntry]],
    dtype: str | None,
    same_bytes: SameBytes,
) -> NamePlan:
    """Groups that make every live tensor of a Llama (on meta) from the pieces of each of Meta's tensors.

    Raises MismatchError for names and shapes that don't fit the model, and when ranks differ in what each has whole.
    """
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    rule = DtypeRule(model, dtype)
    groups: list[NameGroup] = []
    unknown: list[str] = []
    for name, parts in pieces.items():
        live, dim = _live(name)
        if name == "tok_embeddings.weight" and parts[0].shape[1] != config.hidden_size:
            dim = 1  # before Llama 3 ranks split the width of the embedding, not its rows
        if not live:
            unknown.append(name)
        elif dim is None:
            _check_same(name, parts, same_bytes)
            groups.append(NameGroup((parts[0].fqn,), {live: parts[0].shape}, cast=rule.of(live)))
        else:
            num_heads = next((number for part, number in heads.items() if f".{part}." in live), 0)
            groups.append(_joined(live, parts, dim, num_heads, rule.of(live)))
    if set(unknown) - {COMPUTED}:
        raise MismatchError(f"{type(model).__name__} has no place for {name_some(set(unknown) - {COMPUTED})}")
    naming = Naming(NAMING, type(model).__name__, (), transformers.__version__)
    return settle_import(model, groups, naming, [], same_bytes)


def _live(name: str) -> tuple[str, int | None]:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return "", None
    live, dim = _LAYER[match[2]]
    return f"model.layers.{match[1]}.{live}", dim


def _check_same(name: str, parts: Sequence[TensorEntry], same_bytes: SameBytes) -> None:
    if not all(same_bytes(parts[0].fqn, part.fqn) for part in parts[1:]):
        raise MismatchError(f"{name} differs between the files, each of which should have all of it")


def _joined(live: str, parts: Sequence[TensorEntry], dim: int, num_heads: int, cast: str | None) -> NameGroup:
    """The pieces of all ranks as one tensor, for queries and keys with their rows reordered."""
    shape = list(parts[0].shape)
    other = [part.fqn for part in parts if [n for d, n in enumerate(part.shape) if d != dim] != _without(shape, dim)]
    if len(shape) != 2 or other:
        raise MismatchError(f"the pieces of {live} don't fit together")
    shape[dim] = sum(part.shape[dim] for part in parts)
    sources = tuple(part.fqn for part in parts)
    if len(parts) == 1 and not num_heads:
        return NameGroup(sources, {live: tuple(shape)}, cast=cast)
    if num_heads and shape[0] % (2 * num_heads):
        raise MismatchError(f"{live} has {shape[0]} rows, which are not those of {num_heads} heads")

    def join(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        whole = torch.cat([tensors[name] for name in sources], dim=dim)
        return {live: halves_apart(whole, num_heads) if num_heads else whole}

    return NameGroup(sources, {live: tuple(shape)}, join, "Concatenate" if len(parts) > 1 else "Permute", cast)


def _without(shape: Sequence[int], dim: int) -> list[int]:
    return [n for d, n in enumerate(shape) if d != dim]


def _size(pieces: Mapping[str, Sequence[TensorEntry]], name: str, dim: int) -> int:
    """A tensor's size along the dim that ranks split, or that each has whole."""
    if name not in pieces or len(pieces[name][0].shape) <= dim:
        raise MismatchError(f"the weights lack {name}", hint="are they a Llama in Meta's form?")
    sizes = [part.shape[dim] for part in pieces[name]]
    return sizes[0] if _live(name)[1] is None else sum(sizes)


def _number(params: Mapping[str, Any], key: str, default: Any, kind: type = float) -> Any:
    """One of the params as a positive number; `default` where it is absent or null. Raises DamagedError."""
    stated = params.get(key)
    value: Any = default if stated is None else stated
    if type(value) not in (int, kind) or not 0 < value < 1e12:
        raise DamagedError(f"params.json has an impossible {key}: {str(value)[:100]}")
    return kind(value)
