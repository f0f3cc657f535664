"""How much memory of a GPU a training step needs: arithmetic over a model's sizes, without the model.

It describes what trainer/ does: FSDP2 on every block, on an embedding and a head that aren't tied, and then on the rest
(the root), but for a rank alone that would gain nothing from it; gradients summed in fp32, AdamW, sdpa attention, cross
entropy in fp32. A step has four moments at which it may need the most. Gradients are made while activations are given
back, so the parts are not all there at once:

* the loss: all activations, and the logits several times over; no gradients yet
* the backward pass of the last block, with which it begins, and of the first, with which it ends
* the reduction of the last gradients, the root's or the embedding's, when all others are there
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

#: Gradients are summed over ranks, and norms and the loss are computed, in fp32.
_FP32_BYTES = 4

#: AdamW keeps a mean of the gradients and one of their squares.
_NUM_MOMENTS = 2

#: Of a moment in 8 bits (trainer/adamw8bit.py): a code a parameter, and a scale in fp32 for each block of 256.
EIGHT_BIT_MOMENT_BYTES = 1 + _FP32_BYTES / 256

#: What no tensor shows: the CUDA context, loaded kernels, workspaces of cuBLAS, buffers of NCCL.
CONTEXT_BYTES = 1_000_000_000

#: What the caching allocator holds in gaps, by the tensors' peak.
GAPS_FRACTION = 0.05

#: What is kept of a block for its backward pass, by the trainer's --activation-checkpointing: all that autograd keeps;
#: attention and some of the matrix products (trainer/selective.py); its input alone.
CHECKPOINTING = ("none", "selective", "block")

#: More GPUs are not looked for.
MAX_GPUS = 1 << 16


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder as one rank of a tensor-parallel group computes it.

    `block_parameters` are those of each repeated block, `root_parameters` those of all else, of them `head_parameters`
    the output head's and `embedding_parameters` the embedding's, 0 where the two are tied. Widths are elements a token:
    `hidden` between blocks, `query` and `key` of all heads together, `mlp` inside the MLP (of all experts that a token
    goes through), `routed` the copies of the hidden state that are sent to experts. `num_norms` are over the hidden
    state of a block; `has_head_norms` when queries and keys have some.
    """

    block_parameters: tuple[int, ...]
    root_parameters: int
    head_parameters: int
    vocab: int
    hidden: int
    query: int
    key: int
    mlp: int
    routed: int = 0
    num_norms: int = 2
    has_head_norms: bool = False
    embedding_parameters: int = 0

    @property
    def num_parameters(self) -> int:
        return sum(self.block_parameters) + self.root_parameters

    @property
    def num_blocks(self) -> int:
        return len(self.block_parameters)


@dataclass(frozen=True)
class TrainingSetup:
    """One rank's part of a step. `num_shards` ranks share the parameters; `num_micro_steps` are accumulated.

    `optimizer_bytes` are those of one moment of one parameter. The head and the loss are computed for at most
    `loss_chunk_elements` logits at a time, or for all at once (None). Blocks that are `compiled` keep fewer
    activations. Without `reshard_after_forward` the blocks' gathered weights stay until their backward pass. A rank
    that is `alone` does without FSDP2 where weights are stored as they are computed with and nothing is accumulated.
    """

    seq_len: int
    micro_batch_size: int = 1
    num_shards: int = 1
    num_micro_steps: int = 1
    parameter_bytes: int = 4
    optimizer_bytes: float = 4
    compute_bytes: int = 2
    loss_chunk_elements: int | None = None
    compiled: bool = False
    reshard_after_forward: bool = True
    alone: bool = False

    @property
    def is_sharded(self) -> bool:
        """False when FSDP2 would only copy (trainer/parallel.py)."""
        return not (self.alone and self.parameter_bytes == self.compute_bytes and self.num_micro_steps == 1)

    @property
    def num_tokens(self) -> int:
        """Tokens in one forward pass of one rank."""
        return self.seq_len * self.micro_batch_size


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. The parts are each at its own largest; `peak_bytes` is the most that tensors hold at a time,
    what `torch.cuda.max_memory_allocated` shows, and `peak_moment` says when."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    loss_bytes: int
    buffers_bytes: int
    peak_bytes: int
    peak_moment: str

    @property
    def needed_bytes(self) -> int:
        """What the GPU must have: the peak, gaps between tensors, and what is no tensor."""
        return math.ceil(self.peak_bytes * (1 + GAPS_FRACTION)) + CONTEXT_BYTES


def fsdp_memory(model: ModelSizes, setup: TrainingSetup, checkpointing: str) -> Memory:
    """A step with FSDP2 over `num_shards` ranks, or without where the trainer does without (`is_sharded`);
    `checkpointing` is one of CHECKPOINTING.

    Of a block that runs, a rank holds the whole weights, in the backward pass those of the next one too, the whole
    gradients, and the fp32 copy of the ones before that are being summed: the last block's, or the head's. The root's
    weights stay whole all the time, those of a head apart while it runs, of an embedding not in the backward pass.
    """
    if not setup.is_sharded:
        return _unsharded_memory(model, setup, checkpointing)
    compute, shards = setup.compute_bytes, setup.num_shards
    weights, gradients, optimizer = _states(model, setup)
    block, head = max(model.block_parameters, default=0), model.head_parameters
    is_tied = not model.embedding_parameters
    root = model.root_parameters if is_tied else model.root_parameters - head - model.embedding_parameters
    last = root if is_tied else model.embedding_parameters
    # Alone, a rank doesn't fetch the next block's weights ahead.
    at_once = block * (1 if shards == 1 else 2)
    at_most = at_once if setup.reshard_after_forward else sum(model.block_parameters)
    reduced_before = block if is_tied else max(block, head)
    last_reduction = last * (max(compute, _FP32_BYTES if shards == 1 else 0) + _FP32_BYTES)
    accumulated = model.num_parameters * _FP32_BYTES if setup.num_micro_steps > 1 else 0

    kept, running = _activations(model, setup, checkpointing)
    kept_per_block = kept // max(1, model.num_blocks)
    loss = _loss(model, setup)
    states = weights + optimizer
    head_gradient = head * compute if is_tied else math.ceil(head / shards) * setup.parameter_bytes
    at_backward = states + (root + block) * compute + running
    moments = {
        "loss": states
        + (root + (0 if is_tied else head) + (0 if setup.reshard_after_forward else at_most)) * compute
        + (accumulated + kept + loss),
        "last block's backward": at_backward
        + (at_most * compute + reduced_before * _FP32_BYTES + head_gradient + accumulated + kept),
        "first block's backward": at_backward
        + (at_once * compute + block * _FP32_BYTES + (head_gradient if is_tied else 0) + gradients + kept_per_block),
        "reduction of the last gradients": states + gradients + last_reduction,
    }
    moment = max(moments, key=lambda name: moments[name])
    buffers = max((root + block + at_most) * compute + reduced_before * _FP32_BYTES, last_reduction) + accumulated
    return Memory(weights, gradients, optimizer, kept + running, loss, buffers, moments[moment], moment)


def _unsharded_memory(model: ModelSizes, setup: TrainingSetup, checkpointing: str) -> Memory:
    """The trainer's step on one rank without FSDP2: the weights are there once, and gradients as they are made."""
    weights, gradients, optimizer = _states(model, setup)
    kept, running = _activations(model, setup, checkpointing)
    loss = _loss(model, setup)
    states = weights + optimizer
    of_head = model.head_parameters * setup.parameter_bytes
    block = max(model.block_parameters, default=0) * setup.parameter_bytes
    moments = {
        "loss": states + kept + loss,
        "last block's backward": states + of_head + block + kept + running,
        "first block's backward": states + gradients + kept // max(1, model.num_blocks) + running,
    }
    moment = max(moments, key=lambda name: moments[name])
    return Memory(weights, gradients, optimizer, kept + running, loss, 0, moments[moment], moment)


def ddp_memory(model: ModelSizes, setup: TrainingSetup, checkpointing: str) -> Memory:
    """A step with DistributedDataParallel (gradients as views of its buckets) under autocast: every rank holds it all.

    Autocast keeps a copy of the weights in the dtype of the computation until the forward pass is over.
    """
    setup = TrainingSetup(**{**vars(setup), "num_shards": 1})
    weights, gradients, optimizer = _states(model, setup)
    casts = model.num_parameters * setup.compute_bytes if setup.compute_bytes < setup.parameter_bytes else 0
    kept, running = _activations(model, setup, checkpointing)
    loss = _loss(model, setup)
    states = weights + gradients + optimizer + casts + kept
    moments = {
        "loss": states + loss,
        "last block's backward": states + running,
    }
    moment = max(moments, key=lambda name: moments[name])
    return Memory(weights, gradients, optimizer, kept + running, loss, casts, moments[moment], moment)


def fewest_gpus(fits: Callable[[int], bool], step: int, limit: int = MAX_GPUS) -> int | None:
    """The smallest multiple of `step` GPUs that `fits`; None beyond `limit`. More than two never make it worse."""
    counts = range(step, limit + 1, step)
    if counts and fits(counts[0]):
        return counts[0]
    place = bisect.bisect_left(counts, True, key=fits)
    return counts[place] if place < len(counts) else None


def _states(model: ModelSizes, setup: TrainingSetup) -> tuple[int, int, int]:
    """A rank's weights, gradients (in the weights' dtype) and optimizer state."""
    held = math.ceil(model.num_parameters / setup.num_shards)
    optimizer = math.ceil(held * _NUM_MOMENTS * setup.optimizer_bytes)
    return held * setup.parameter_bytes, held * setup.parameter_bytes, optimizer


def _loss(model: ModelSizes, setup: TrainingSetup) -> int:
    """What the head's output and the cross entropy take at their worst.

    All at once: in the backward pass the log-probabilities, their gradient, and that of the logits, in fp32. In chunks:
    of a chunk the logits as computed and in fp32, the probabilities, the labels as such, and the difference (compiled:
    the logits, as such and in fp32, and their gradient); and of all tokens the gradients of head and hidden states.
    """
    compute, elements = setup.compute_bytes, setup.num_tokens * model.vocab
    if setup.loss_chunk_elements is None:
        return elements * 3 * _FP32_BYTES
    num_chunks = math.ceil(elements / setup.loss_chunk_elements)
    chunk = math.ceil(setup.num_tokens / num_chunks) * model.vocab
    widened = _FP32_BYTES if compute < _FP32_BYTES else 0
    gradients = model.head_parameters * _FP32_BYTES + setup.num_tokens * model.hidden * compute
    of_head = model.head_parameters * compute  # the gradient, scaled and cast
    per_logit = 2 * compute + widened if setup.compiled else compute + widened + 3 * _FP32_BYTES
    return gradients + max(chunk * per_logit, of_head)


def _activations(model: ModelSizes, setup: TrainingSetup, checkpointing: str) -> tuple[int, int]:
    """What all blocks keep for the backward pass, and what the backward pass of one block needs beyond that."""
    tokens, compute = setup.num_tokens, setup.compute_bytes
    per_block = tokens * (compiled_bytes_per_token if setup.compiled else eager_bytes_per_token)(model, compute)
    kept = {"none": per_block, "selective": tokens * selective_bytes_per_token(model, compute)}
    kept["block"] = tokens * model.hidden * compute
    final_norm = tokens * model.hidden * (_FP32_BYTES + 2 * compute)
    gradients = tokens * (3 * compute * model.mlp + 3 * _FP32_BYTES * model.hidden)
    again = 0 if checkpointing == "none" else per_block
    return model.num_blocks * kept[checkpointing] + final_norm, again + gradients


def eager_bytes_per_token(model: ModelSizes, compute: int) -> int:
    """Bytes a token that autograd keeps of a block.

    A norm keeps its input in fp32, the normalised values, and its output, which the projections after it read.
    Attention keeps queries, keys, values and its output (the kernels of sdpa keep no scores); a gated MLP keeps gate,
    up, the activated gate and their product; routing to experts keeps each expert's input and output.
    """
    norms = model.num_norms * model.hidden * (_FP32_BYTES + 2 * compute)
    head_norms = (model.query + model.key) * (_FP32_BYTES + compute) if model.has_head_norms else 0
    attention = 2 * (model.query + model.key) * compute
    return norms + head_norms + attention + (4 * model.mlp + 2 * model.routed) * compute


def compiled_bytes_per_token(model: ModelSizes, compute: int) -> int:
    """The same of a compiled block, whose elementwise work is done again in the backward pass.

    What the partitioner of torch.compile keeps: a norm's input and output, what attention does, and of a gated MLP
    gate, up and their product. Counted by `tests/trainer/test_memory.py`.
    """
    norms = model.num_norms * model.hidden * 2
    head_norms = model.query + model.key if model.has_head_norms else 0
    attention = 2 * (model.query + model.key)
    return (norms + head_norms + attention + 3 * model.mlp + 2 * model.routed) * compute


def selective_bytes_per_token(model: ModelSizes, compute: int) -> int:
    """A block's input, its queries, keys, values, attention and what the projection after it makes, and the gate."""
    return (2 * model.hidden + 2 * (model.query + model.key) + model.mlp) * compute
