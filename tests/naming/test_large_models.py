"""What a model of 405B parameters takes in memory: its embeddings, of 3.9 GiB, are never read as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from ckptool.core.checkpoint import Manifest
from ckptool.core.cuts import cut_tensor
from ckptool.core.plan import Plan
from ckptool.core.tensors import TensorEntry
from ckptool.naming.composition import compose, made_entries
from ckptool.naming.dialects import load_dialect
from ckptool.naming.groups import NamePlan
from ckptool.naming.live_names import plan_live
from ckptool.naming.meta_llama import plan_meta_import
from ckptool.naming.name_table import groups_from_live
from ckptool.naming.transformers_names import plan_export
from ckptool.planner import group_bytes, plan_conversion

GIB = 1 << 30
NUM_META_RANKS = 8


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    """Llama 3.1 405B in one layer; the others are like it."""
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=1,
        num_attention_heads=128,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name, "bfloat16", shape, ())


def never_asked(a: str, b: str) -> bool:
    return True


def planned(names: NamePlan, entries: dict[str, TensorEntry]) -> Plan:
    source = Manifest("405B", entries)
    return plan_conversion("export", source, names, "memory", cut=cut_tensor, piece_bytes=32 << 20, num_workers=2)


def conversions(model: transformers.PreTrainedModel) -> Iterator[tuple[str, NamePlan, dict[str, TensorEntry]]]:
    live = {name: entry(name, tuple(t.shape)) for name, t in model.state_dict().items()}
    for library in ("torchtitan", "torchtune"):
        groups = groups_from_live(load_dialect(library), live, model.config)
        there = NamePlan(tuple(groups), plan_export(model, live, None, None).naming)
        yield f"to {library}", there, live
        theirs = made_entries(there, live)
        back = plan_live(model, theirs, never_asked)
        yield f"from {library}", compose(back, plan_export(model, made_entries(back, theirs), None, None)), theirs
    padded = theirs | {
        name: entry(name, (128_512, *e.shape[1:])) for name, e in theirs.items() if e.shape[0] == 128_256
    }
    cut = plan_live(model, padded, never_asked)
    assert len(cut.padded) == 2
    yield "padded", compose(cut, plan_export(model, made_entries(cut, padded), None, None)), padded
    pieces = dict(meta_pieces(live))
    of_ranks = {part.fqn: part for parts in pieces.values() for part in parts}
    yield "Meta", plan_meta_import(model, pieces, None, never_asked), of_ranks


def meta_pieces(live: dict[str, TensorEntry]) -> Iterator[tuple[str, list[TensorEntry]]]:
    """As eight ranks of Meta's have stored it: split along the dim that tensor parallelism splits."""
    names = {
        **{"model.embed_tokens": ("tok_embeddings", 0), "model.norm": ("norm", None), "lm_head": ("output", 0)},
        **{"self_attn.q_proj": ("attention.wq", 0), "self_attn.k_proj": ("attention.wk", 0)},
        **{"self_attn.v_proj": ("attention.wv", 0), "self_attn.o_proj": ("attention.wo", 1)},
        **{"mlp.gate_proj": ("feed_forward.w1", 0), "mlp.up_proj": ("feed_forward.w3", 0)},
        **{"mlp.down_proj": ("feed_forward.w2", 1), "input_layernorm": ("attention_norm", None)},
        "post_attention_layernorm": ("ffn_norm", None),
    }
    for name, stored in live.items():
        part = name.removesuffix(".weight").removeprefix("model.layers.0.")
        theirs, dim = names[part]
        theirs = f"{'layers.0.' if name.startswith('model.layers') else ''}{theirs}.weight"
        shape = tuple(n // NUM_META_RANKS if d == dim else n for d, n in enumerate(stored.shape))
        yield theirs, [entry(f"{rank}/{theirs}", shape) for rank in range(NUM_META_RANKS)]


def test_what_is_not_copied_in_pieces_is_converted_one_tensor_at_a_time(model: transformers.PreTrainedModel) -> None:
    """Queries and keys, whose rows are put into another order: 1.5 GiB. Of Meta's form also what its ranks have split
    along the second dim: 4.9 GiB."""
    queries_and_keys = {"q_proj", "k_proj", "wq", "wk"}
    for way, names, entries in conversions(model):
        plan = planned(names, entries)
        whole = [item for item in plan.items if item.transform is not None]
        made = {target.fqn.split(".")[-2] for item in whole for target in item.targets}
        largest = max(group_bytes(item, Manifest("405B", entries)) for item in whole)
        assert made - queries_and_keys == ({"o_proj", "down_proj"} if way == "Meta" else set()), way
        assert largest == (3 * 16_384 * 53_248 * 2 if way == "Meta" else 1.5 * GIB), way
        assert largest <= plan.peak_bytes < largest + 0.5 * GIB, way
