"""The run, top to bottom: build, load, loop, save."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from torch.distributed.tensor import DTensor

from ckptool import CkptoolError
from trainer import checkpoint, parallel
from trainer.adamw import OnePassAdamW
from trainer.async_save import Saves, SaveTimes
from trainer.build import build_state
from trainer.checkpoint import TrainingState
from trainer.compile_cache import CompileCache, count_graphs
from trainer.config import TrainConfig, parse_profile
from trainer.curves import parse_boards
from trainer.data import TrainingData, open_data, prepare
from trainer.evaluation import HeldOut
from trainer.flops import flops_per_token, peak_flops
from trainer.fp8 import notes as fp8_notes
from trainer.loader import LoaderData
from trainer.loss import batch_loss, use_chunks
from trainer.memory_advice import MemoryAdvice
from trainer.metrics import Log, StepMetrics, max_memory_bytes
from trainer.model import check_positions
from trainer.optimizer import kernel_note
from trainer.origin import Origin, find_origin
from trainer.packing_check import check_documents_apart
from trainer.parallel import Ranks
from trainer.profiling import Profile
from trainer.same_options import check_same_options
from trainer.schedule import learning_rate
from trainer.sharding import reduce_gradients
from trainer.shared_root import check_shared_root
from trainer.signals import StopSignals
from trainer.sole_run import sole_run
from trainer.startup import Startup
from trainer.stopwatch import Stopwatch
from trainer.stragglers import RankTimes, find_stragglers, seconds_of_ranks
from trainer.units import MicroBatch, check_tokens
from trainer.watchdog import Watchdog

#: With --on-nonfinite skip, more steps in a row than this are no bad batch but a broken run.
MAX_SKIPPED_IN_A_ROW = 10


@dataclass(frozen=True)
class Run:
    """What the loop works with."""

    config: TrainConfig
    ranks: Ranks
    origin: Origin
    state: TrainingState
    data: TrainingData | LoaderData
    held_out: HeldOut | None
    log: Log
    stop: StopSignals
    watch: Stopwatch
    saves: Saves
    cache: CompileCache | None
    startup: Startup


def train(config: TrainConfig, startup: Startup | None = None) -> None:
    """Train to `config.steps`, saving on the way. Every rank calls this. `startup` is what went before.

    Raises CkptoolErrors for all that a person can put right.
    """
    startup = startup or Startup()
    with contextlib.ExitStack() as context:
        stop = context.enter_context(StopSignals())
        ranks = context.enter_context(parallel.joined_ranks(config.device, config.dp_replicate, config.tp))
        log, watch = Log(config.work, ranks.rank), Stopwatch()
        context.enter_context(Watchdog(ranks, watch, stop, config.work / "failures", config.hang_minutes * 60))
        check_same_options(config, ranks)
        config.check(ranks.num_data_ranks)
        if config.deterministic:
            parallel.make_deterministic()
        check_shared_root(config.work, ranks)
        context.enter_context(sole_run(config.work, ranks, stop, log.say))
        startup.ended("ranks")
        origin = ranks.from_rank0(lambda: find_origin(config))
        for line in origin.describe():
            log.say(line)
        advice = MemoryAdvice(config, origin.hf_folder, ranks.world_size, ranks.device)
        context.enter_context(advice.when_out_of_memory(watch))
        startup.ended("origin")
        prepared = ranks.from_rank0(
            lambda: prepare(config.data, config.unit, config.seq_len, origin.hf_folder, config.work, log.say)
        )
        data = open_data(prepared, config.unit, config.seq_len, origin.hf_folder, ranks.data_rank, ranks.num_data_ranks)
        held_out = HeldOut.open(config, origin.hf_folder, ranks, log)
        startup.ended("data")
        cache = CompileCache.open(config, ranks, log)
        startup.ended("compile cache")
        for line in fp8_notes(config, ranks.device):
            log.say(line)
        state = build_state(config, ranks, origin, data.start(config.seed, config.global_batch_size))
        for note in (check_positions(state.model, config.seq_len), kernel_note(state.optimizer)):
            if note:
                log.say(note)
        startup.ended("build")
        if origin.is_resume:
            checkpoint.resume(state, origin, log, config.accept_data_change)
            data.restore_lanes(state.lanes)
        else:
            checkpoint.load_weights(state, origin, log)
        startup.ended("load")
        if config.loss == "chunked" and (reason := use_chunks(state.model, ranks.device, config.compile)):
            log.say(f"note: the loss is plain, not chunked: {reason}")
        if config.unit == "pack":
            check_documents_apart(state.model, ranks.device)
        log.say(
            f"world size {ranks.world_size} on {ranks.device.type}, step {state.step} of {config.steps}, "
            f"{state.position.consumed:,} units trained"
        )
        if state.step >= config.steps:
            log.say("nothing is left to train: more --steps go on from here")
        saves = context.enter_context(Saves(config, origin, ranks, log))
        context.enter_context(log.drawing(parse_boards(config.log_to), state.step))
        startup.ended("checks")
        run_steps(Run(config, ranks, origin, state, data, held_out, log, stop, watch, saves, cache, startup))


def run_steps(run: Run) -> None:
    """The loop. The position moves only after the optimizer has stepped, so it counts what was really trained.

    Each rank votes on what not all of them may see, a signal or a clock, so that all save and stop at the same step.
    """
    config, ranks, state, log, watch, saves = run.config, run.ranks, run.state, run.log, run.watch, run.saves
    attempt = ranks.from_rank0(lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    saved_at = time.monotonic()
    num_skipped = 0
    flops, peak = flops_per_token(state.model, state.model.config, config.seq_len), peak_flops(ranks.device)
    profile = Profile(*parse_profile(config.profile), config.work / "profile", ranks, log)
    vocab_size = state.model.config.get_text_config().vocab_size
    (must_stop,) = ranks.sum(bool(run.stop.received))
    while state.step < config.steps and not must_stop:
        began = time.perf_counter()
        saves.times = SaveTimes()
        watch.begin(state.step)
        profile.before(state.step + 1)
        lr = set_learning_rate(config, state)
        seed_dropout(config.seed, state.step, ranks.data_rank)
        with watch.phase_of("data"):
            batches = list(
                run.data.micro_batches(state.position, ranks.data_rank, ranks.num_data_ranks, config.micro_batch_size)
            )
            check_tokens(batches, vocab_size)
        # What waits for other ranks is not in "data", or all ranks would seem to read as slowly as the slowest.
        with watch.phase_of("forward and backward"):
            # A step of conversations may hold no trained label at all; its loss is 0.
            num_labels = ranks.total(sum(batch.num_trained() for batch in batches))
            loss, fed = forward_backward(ranks, state, batches, num_labels.clamp(min=1))
            norm = clip_gradients(state, config.grad_clip)
            prepare_update(state.optimizer)
            # The one place where a step waits for the GPU: what follows is begun while it still updates the weights.
            is_late = ranks.rank == 0 and config.saves_at_age(time.monotonic() - saved_at)
            mean_loss, must_stop, must_save, grad_norm, num_tokens = ranks.sum(
                loss, bool(run.stop.received), is_late, known=[norm, num_labels]
            )
        with watch.phase_of("optimizer"):
            saves.before_update()
            num_skipped = 0 if math.isfinite(grad_norm) else num_skipped + 1
            check_finite(config, state.step + 1, grad_norm, num_skipped)
            if not num_skipped:
                state.optimizer.step()
            state.optimizer.zero_grad()
            state.step += 1
            state.fed = state.fed.plus((g, state.position.unit(g)) for g in fed)
            state.position = state.position.advance()
        step_seconds = time.perf_counter() - began
        run.startup.first_step_ended(ranks, log, attempt, state.step, count_graphs())
        profile.after(state.step)
        eval_loss = None
        if run.held_out is not None and config.evaluates_after(state.step):
            with watch.phase_of("evaluation"):
                eval_loss = run.held_out.loss(state.model, ranks, config.micro_batch_size)
        if run.cache is not None:
            run.cache.keep()
        if config.log_samples:
            log.samples(attempt, state.step, sorted(unit for part in ranks.gather_data(fed) for unit in part))
        if config.saves_after(state.step) or must_save or must_stop:
            with watch.phase_of("save"):
                state.lanes = run.data.lane_states(ranks)
                saves.save(state)
                if must_stop or state.step == config.steps:
                    saves.finish(state)
            saved_at = time.monotonic()
        saves.collect(state)
        times = None
        if config.straggler_factor and state.step % config.log_every == 0:
            times = ranks.gather_on_rank0(RankTimes.measure(ranks.rank, ranks.device, step_seconds, watch))
        tokens_per_second = num_tokens / step_seconds
        metrics = StepMetrics(
            step=state.step,
            loss=mean_loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=int(num_tokens),
            tokens_per_second=tokens_per_second,
            step_seconds=step_seconds,
            consumed=state.position.consumed,
            max_memory_bytes=max_memory_bytes(ranks.device),
            checkpoint_seconds=saves.times.durable_seconds,
            checkpoint_stall_seconds=saves.times.stall_seconds,
            world_size=ranks.world_size,
            attempt=attempt,
            skipped=num_skipped > 0,
            eval_loss=eval_loss,
            data_seconds=watch.seconds["data"],
            forward_backward_seconds=watch.seconds["forward and backward"],
            optimizer_seconds=watch.seconds["optimizer"],
            mfu=flops * tokens_per_second / (peak * ranks.world_size) if flops and peak else None,
            rank_data_seconds=seconds_of_ranks(times, "data"),
            rank_probe_seconds=seconds_of_ranks(times, "probe"),
        )
        log.metrics(metrics)
        if is_shown(config, metrics):
            log.say(metrics.progress_line(config.steps))
        for line in find_stragglers(times, config.straggler_factor) if times else ():
            log.say(line)
    if must_stop and state.step < config.steps:
        kept = f"{state.last_saved} holds it" if state.last_saved else "nothing new to save"
        log.say(f"stopped at step {state.step} of {config.steps}: {kept}; the same command goes on from there")


def is_shown(config: TrainConfig, metrics: StepMetrics) -> bool:
    """True for a step with a progress line: each --log-every-th, the last, and those in which more happened."""
    is_due = metrics.step % config.log_every == 0 or metrics.step == config.steps
    return is_due or metrics.skipped or metrics.checkpoint_seconds > 0 or metrics.eval_loss is not None


def set_learning_rate(config: TrainConfig, state: TrainingState) -> float:
    """Give the optimizer the rate of the next step, and return it."""
    lr = learning_rate(
        state.step, peak=config.lr, warmup_steps=config.warmup_steps, steps=config.steps, schedule=config.schedule
    )
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    return lr


def check_finite(config: TrainConfig, step: int, grad_norm: float, num_skipped: int) -> None:
    """Raise CkptoolError when `num_skipped` steps in a row had no finite gradient, and that is reason to stop."""
    if num_skipped > (MAX_SKIPPED_IN_A_ROW if config.on_nonfinite == "skip" else 0):
        raise CkptoolError(
            f"step {step}: the gradient norm is {grad_norm:g}; the step was not applied"
            + (f", nor were the {num_skipped - 1} before it" if num_skipped > 1 else ""),
            hint="lower --lr, --resume from an earlier checkpoint, or --on-nonfinite skip when single batches do this",
        )


def forward_backward(
    ranks: Ranks, state: TrainingState, batches: list[MicroBatch], num_tokens: torch.Tensor | int
) -> tuple[torch.Tensor, list[int]]:
    """Accumulate the step's gradients. Returns this rank's part of the mean loss, and the units it was fed.

    The loss is a sum over trained labels divided by `num_tokens`, their number over all ranks, so its gradients, summed
    over ranks and micro-batches, are those of the mean over the global batch whatever the world size.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
    fed: list[int] = []
    for number, batch in enumerate(batches, start=1):
        reduce_gradients(state.model, number == len(batches))
        loss = batch_loss(state.model, batch, ranks.device) / num_tokens
        loss.backward()
        loss_sum += loss.detach()
        fed += batch.units
    return loss_sum, fed


def clip_gradients(state: TrainingState, max_norm: float) -> torch.Tensor:
    """Have the optimizer's next step scale the gradients down to `max_norm` (0: leave them); returns their global norm.

    Nothing passes over the gradients for it: the update divides by the scale as it reads them.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in state.parameters().values() if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    scale = ((norm.float() + 1e-6) / max_norm).clamp(min=1) if max_norm else None  # torch's clip_grad_norm_
    state.optimizer.grad_scale = scale  # type: ignore[attr-defined]  # known to torch's fused optimizers and to ours
    return norm


def prepare_update(optimizer: torch.optim.Optimizer) -> None:
    """Have the host's part of the next update done while the GPU is still at the backward pass."""
    if isinstance(optimizer, OnePassAdamW):
        optimizer.prepare()


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Random numbers as a function of seed, step and rank: a resumed run draws those it would have drawn."""
    torch.manual_seed(((seed << 44) ^ (step << 16) ^ rank) & (2**63 - 1))
