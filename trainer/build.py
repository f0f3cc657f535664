"""The model and the optimizer of a run, in the order that FSDP2 demands: meta, split, wrap, shard, memory."""

from __future__ import annotations

import math

import torch

from ckptool import DataPosition, MismatchError, UsageError
from trainer import sharding
from trainer.checkpoint import TrainingState, trained_parameters
from trainer.config import TrainConfig
from trainer.fp8 import has_odd_tokens, use_fp8
from trainer.lora import Adapter, add_adapter, init_adapter
from trainer.model import (
    build_meta_model,
    checkpoint_activations,
    materialize,
    named_blocks,
    tie,
    ties_of,
)
from trainer.optimizer import build_optimizer
from trainer.origin import Origin
from trainer.parallel import TENSOR_AXIS, Ranks
from trainer.tensor_parallel import split_tensors


def build_state(config: TrainConfig, ranks: Ranks, origin: Origin, position: DataPosition) -> TrainingState:
    """Model and optimizer, sharded over the ranks; the weights are garbage until a checkpoint is loaded."""
    dtype = param_dtype(config.param_dtype, origin)
    if config.stochastic_rounding and dtype != torch.bfloat16:
        raise UsageError("--stochastic-rounding is for bf16 weights", hint="--param-dtype bf16")
    adapter, computed = Adapter.of(config, origin.adapter), compute_dtype(config.compute_dtype, ranks.device)
    # Weights that are not trained are kept in the dtype that they are computed with anyway.
    model = build_meta_model(
        origin.hf_folder, computed if adapter else dtype, tie_embeddings=not origin.provenance.untied
    )
    ties = ties_of(model)
    if adapter:
        add_adapter(model, adapter, dtype)
    if config.fp8 != "none":
        use_fp8(model, config.fp8, ranks.device, pad_tokens=has_odd_tokens(config.seq_len, position))
    if config.tp > 1:
        split_tensors(model, ranks.mesh[TENSOR_AXIS], ties)
        tie(model, ties)
    if config.activation_checkpointing != "none":
        checkpoint_activations(model, selective=config.activation_checkpointing == "selective")
    blocks = list(named_blocks(model).values())
    if config.compile:
        for block in blocks:
            block.compile()
    num_micro_steps = math.ceil(config.global_batch_size / (config.micro_batch_size * ranks.num_data_ranks))
    if not sharding.gains_nothing_from_sharding(model, ranks.world_size, computed, num_micro_steps, config.cpu_offload):
        sharding.shard(model, blocks, ranks, computed, config.cpu_offload, config.reshard_after_forward)
    materialize(model, ranks.device, ties, config.cpu_offload)
    if adapter:
        init_adapter(model, config.seed)
    parameters = trained_parameters(model, ties, adapter is not None)
    optimizer = build_optimizer(
        parameters,
        config.lr,
        config.weight_decay,
        rounding_seed=config.seed if config.stochastic_rounding else None,
        name=config.optimizer,
        compiled=config.compile,
    )
    return TrainingState(model, optimizer, ties, position, adapter)


def param_dtype(option: str, origin: Origin) -> torch.dtype:
    """The dtype of the trained weights.

    Raises MismatchError for `keep` when the checkpoint mixes several, and for another one than the resumed run's.
    """
    if option != "keep":
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[option]
        if origin.is_resume and origin.stored_dtypes != (str(dtype).removeprefix("torch."),):
            raise MismatchError(
                f"{origin.path} was trained as {', '.join(origin.stored_dtypes)}, and --param-dtype is {option}",
                hint="--param-dtype keep goes on as before; in another dtype, --init-from begins anew",
            )
        return dtype
    if len(origin.stored_dtypes) != 1:
        raise MismatchError(
            f"{origin.path} mixes {', '.join(origin.stored_dtypes)}, so --param-dtype keep has no one dtype",
            hint="--param-dtype fp32",
        )
    return getattr(torch, origin.stored_dtypes[0])


def compute_dtype(option: str, device: torch.device) -> torch.dtype:
    """The dtype of activations and gradients; weights and the reduction of gradients keep theirs."""
    if option == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[option]
