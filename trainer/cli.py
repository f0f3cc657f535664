"""The command line of the trainer: options, one TOML file for their defaults, and errors as one line."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import click

from ckptool import CkptoolError
from trainer.config import TrainConfig, read_defaults
from trainer.os_errors import as_storage_error
from trainer.startup import IMPORTS, Startup

INTERRUPTED = 130


def _use_config_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        known = {str(p.name) for p in ctx.command.params if isinstance(p, click.Option)} - {"config"}
        ctx.default_map = read_defaults(path, known)
    return path


def _root(value: str | Path) -> Path | str:
    """A folder as a Path, a URL as it is."""
    text = str(value).removeprefix("file://")
    if "://" in text:
        return text
    if Path(text).is_file():
        raise click.BadParameter(f"Directory {text!r} is a file.")
    return Path(text)


def _option(name: str, help: str, **settings: Any) -> Any:
    settings.setdefault("show_default", True)
    return click.option(name, help=help, **settings)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_use_config_file,
    help="TOML file with defaults for the options below, under the same names.",
)
@_option("--init-from", "Checkpoint to begin from: a path, or a name under the root.", metavar="NAME")
@_option(
    "--data",
    "Training text: a file, a folder (searched for .txt .md .py .jsonl .parquet) or a glob; JSONL and Parquet need a "
    "`text` field. Several: --data A B, or --data A --data B. Or KIND:PATH, with a kind of text, jsonl, parquet, chat, "
    "hf, stream, tokens or megatron; loader:MODULE:FUNCTION; or a .toml file of [[source]] tables.",
    multiple=True,
    metavar="PATH...",
)
@click.argument("more_data", nargs=-1, metavar="")
@_option(
    "--unit",
    "What is counted and trained: windows of joined documents; rows packed with whole documents that don't see each "
    "other; or documents, padded.",
    type=click.Choice(["window", "pack", "document"]),
    default="window",
)
@_option(
    "--seq-len",
    "Tokens in a unit, at most. Set it once, to what the model is to handle: another cuts the data differently.",
    type=click.IntRange(1),
    default=1024,
)
@_option(
    "--global-batch-size",
    "Units in a step, over all ranks; the training depends on it, and not on the ranks. Enough for a steady loss.",
    type=click.IntRange(1),
    default=8,
)
@_option(
    "--micro-batch-size",
    "Units in one forward pass of one rank: as many as fit, for speed. The training stays the same.",
    type=click.IntRange(1),
    default=1,
)
@_option("--steps", "Optimizer steps in all, those before a resume included.", type=click.IntRange(1), required=True)
@_option(
    "--lr",
    "Peak learning rate. Lower when the loss rises or jumps; LoRA takes about ten times as much.",
    type=click.FloatRange(0),
    default=2e-5,
)
@_option(
    "--warmup-steps",
    "Steps over which the learning rate rises: some, when the loss jumps at the beginning.",
    type=click.IntRange(0),
    default=0,
)
@_option(
    "--schedule",
    "The learning rate after the warmup: falls to 0 at --steps, or stays (constant: when more --steps may follow).",
    type=click.Choice(["cosine", "linear", "constant"]),
    default="cosine",
)
@_option(
    "--optimizer",
    "adamw, or adamw8bit: AdamW whose two moments are 8-bit codes, 2 bytes a parameter instead of 8, when memory is "
    "short. A run goes on with the one that it began with.",
    type=click.Choice(["adamw", "adamw8bit"]),
    default="adamw",
)
@_option(
    "--weight-decay",
    "AdamW weight decay of tensors with two or more dims, times the learning rate; 0: none.",
    type=click.FloatRange(0),
    default=0.1,
)
@_option(
    "--grad-clip",
    "Largest gradient norm, that of all ranks; 0 doesn't clip. Lower when single steps make the loss jump.",
    type=click.FloatRange(0),
    default=1.0,
)
@_option(
    "--on-nonfinite",
    "When the gradient norm is NaN or infinite: stop, or skip the update, say so in metrics.jsonl and go on with the "
    "next data (ten in a row stop all the same).",
    type=click.Choice(["stop", "skip"]),
    default="stop",
)
@_option(
    "--hang-minutes",
    "Minutes without progress inside a step after which the run ends with every rank's stack in ROOT/failures; six "
    "times that for starting, the first step and saves. 0 waits for ever. Raise it when a step takes minutes.",
    type=click.FloatRange(0),
    default=10,
)
@_option("--save-every", "Steps between checkpoints; 0 saves at the end only.", type=click.IntRange(0), default=500)
@_option(
    "--save-every-minutes",
    "Minutes after a checkpoint at which the next is saved, at the end of the step; 0 is no such rule. For machines "
    "that may vanish: it bounds what a crash costs.",
    type=click.FloatRange(0),
    default=0,
)
@_option(
    "--async-save/--no-async-save",
    "Write checkpoints while training goes on, from a copy of the state: on the GPU, or in host memory where that "
    "doesn't fit. Without, when neither has room for one.",
    default=True,
)
@_option(
    "--keep-last",
    "When disks fill up: after each save remove older checkpoints of the run, but for the newest K and pinned ones; 0 "
    "keeps all.",
    type=click.IntRange(0),
    metavar="K",
    default=0,
)
@_option(
    "--keep-every",
    "As --keep-last, but for those whose step is a multiple of N; with both, either keeps one. 0 is no such rule.",
    type=click.IntRange(0),
    metavar="N",
    default=0,
)
@_option(
    "--root",
    "Folder of checkpoints, metrics and the token cache; or a URL, for the checkpoints alone.",
    callback=lambda ctx, param, value: _root(value),
    metavar="FOLDER|URL",
    envvar="CKPTOOL_ROOT",
    show_envvar=True,
    default="ckpt",
)
@_option(
    "--work-dir",
    "With a URL for --root: the folder of metrics and the token cache, which all nodes share.",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("ckpt"),
)
@_option(
    "--upload-to",
    "Bring each checkpoint from the root to this place too, a URL or a folder, beside the training; --resume auto goes "
    "on from the newest in either, and --keep-last and --keep-every prune both.",
    metavar="URL",
    default="",
)
@_option(
    "--upload-mb-per-s",
    "MB/s that --upload-to may use, when others need the network; 0 is no limit.",
    type=click.FloatRange(0),
    default=0,
)
@_option(
    "--resume",
    "auto: the newest complete step-N under the root, else --init-from. never: begin at --init-from. "
    "Or a checkpoint's name.",
    metavar="auto|never|NAME",
    default="auto",
)
@_option(
    "--accept-data-change",
    "Resume although the data, its mixture, --seq-len or --seed is not the checkpoint's; the reason is recorded in the "
    "next one. Each source that changed begins its next epoch.",
    metavar="REASON",
    default="",
)
@_option("--seed", "Order of the data, and dropout: another for a run to compare with.", type=int, default=0)
@_option("--device", "auto: cuda where there is one.", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@_option(
    "--dp-replicate",
    "Copies of the sharded model (HSDP). Ranks within a copy share the parameters, copies exchange gradients only: for "
    "several nodes with a slow network between them, the number of nodes.",
    type=click.IntRange(1),
    default=1,
)
@_option(
    "--tp",
    "Ranks that split each layer among them (tensor parallel, by transformers' plan for the model). For models whose "
    "layers are too large for one GPU; within a node only.",
    type=click.IntRange(1),
    default=1,
)
@_option(
    "--cpu-offload/--no-cpu-offload",
    "Keep weights, gradients and optimizer in host memory. The last resort when they don't fit: slow.",
    default=False,
)
@_option(
    "--reshard-after-forward/--no-reshard-after-forward",
    "Give back a block's gathered weights after its forward pass, and gather them again for its backward pass. "
    "Without, less is sent and every rank holds all weights (2 bytes each in bf16): faster where memory is left.",
    default=True,
)
@_option(
    "--deterministic/--no-deterministic",
    "Only kernels that give the same bits each time: slower; an operation that has none is an error. To find out "
    "whether two runs differ for a reason.",
    default=False,
)
@_option(
    "--activation-checkpointing",
    "When memory is short. block: keep only each block's input and recompute the rest in the backward pass, a third "
    "more compute. selective: keep attention and most matrix products too.",
    type=click.Choice(["none", "selective", "block"]),
    default="none",
)
@_option(
    "--compile/--no-compile",
    "torch.compile each block: faster and in less memory, after minutes at the first step. For long runs on GPUs.",
    default=False,
)
@_option(
    "--compile-cache/--no-compile-cache",
    "With --compile: keep what was compiled in ROOT/compile-cache, and load what earlier starts have kept there. It is "
    "code that is run: only where nobody else has made or can change the root.",
    default=False,
)
@_option(
    "--fp8",
    "For speed, matrix products of the blocks in 8-bit floats: on GPUs from Ada and Hopper on, with --compile. "
    "tensorwise: one scale a tensor. rowwise: one a row, so that a large number harms its row alone. Checkpoints stay "
    "as they are.",
    type=click.Choice(["none", "tensorwise", "rowwise"]),
    default="none",
)
@_option(
    "--loss",
    "chunked: the output head and the cross-entropy some tokens at a time, never the logits of all in memory (a model "
    "that changes its logits after the head has the plain loss all the same). plain: all at once, to compare.",
    type=click.Choice(["chunked", "plain"]),
    default="chunked",
)
@_option(
    "--log-every", "Steps between progress lines (metrics.jsonl has every step).", type=click.IntRange(1), default=10
)
@_option(
    "--log-to",
    "Draw the numbers of metrics.jsonl as curves too: tensorboard (files in ROOT/tensorboard), wandb, both with a "
    "comma between them, or none. auto: tensorboard where it is installed.",
    metavar="auto|none|NAMES",
    default="auto",
)
@_option(
    "--straggler-factor",
    "With each progress line, name the ranks that take so many times the median for reading data or for a matrix "
    "product of fixed size; 0 doesn't measure.",
    type=click.FloatRange(0),
    default=1.5,
)
@_option(
    "--profile",
    "When steps are slow: write a torch.profiler trace of N steps from STEP on to ROOT/profile, and print where their "
    "time went.",
    metavar="STEP:N",
    default="",
)
@_option("--eval-data", "Held-out text, never trained: paths as for --data. Repeat it.", multiple=True, metavar="PATH")
@_option(
    "--eval-every",
    "Steps between losses on --eval-data (eval_loss in metrics.jsonl); 0: after the last step only.",
    type=click.IntRange(0),
    default=500,
)
@_option(
    "--eval-units",
    "At most so many units of --eval-data: more for a steadier loss.",
    type=click.IntRange(1),
    default=256,
)
@_option(
    "--param-dtype",
    "Dtype of the trained weights and optimizer state; keep: as stored. When memory is short, bf16 with "
    "--stochastic-rounding.",
    type=click.Choice(["fp32", "bf16", "keep"]),
    default="fp32",
)
@_option(
    "--stochastic-rounding/--no-stochastic-rounding",
    "With bf16 weights: compute updates in fp32 and round by chance, so that small ones are not lost. 12 bytes a "
    "parameter instead of 16, 6 with --optimizer adamw8bit, where fp32 weights don't fit.",
    default=False,
)
@_option(
    "--lora-rank",
    "Freeze the model and train a LoRA adapter of this rank; checkpoints hold the adapter only (a few per cent of the "
    "model), and need the base beside them. 8 to 64 are usual; 0 trains all weights.",
    type=click.IntRange(0),
    default=0,
)
@_option(
    "--lora-alpha",
    "The adapter's output is scaled by this number over the rank; 0: twice the rank.",
    type=click.FloatRange(0),
    default=0,
)
@_option(
    "--lora-targets",
    "Layers that get an adapter, by the last words of their names, as q_proj,v_proj; all-linear: every linear layer "
    "but the output head.",
    metavar="NAMES",
    default="all-linear",
)
@_option(
    "--compute-dtype",
    "Dtype of the forward and backward pass; auto: bf16 on cuda, fp32 on cpu (bf16 is ten times slower on most CPUs).",
    type=click.Choice(["auto", "bf16", "fp32"]),
    default="auto",
)
@_option(
    "--log-samples/--no-log-samples",
    "Append every step's unit numbers to samples.jsonl, to prove that each was trained once.",
    default=False,
)
def command(data: tuple[str, ...], more_data: tuple[str, ...], **options: Any) -> None:
    """Train a causal language model with FSDP2, from a checkpoint that `ckptool import-hf` made.

    Saves step-N checkpoints under the root and goes on from the newest one, on any world size up to the global batch.
    Run it alone, or on N ranks: torchrun --nproc-per-node N -m trainer ...
    """
    config, startup = TrainConfig(data=data + more_data, **options), Startup.of_process()
    _quiet_libraries()
    from trainer.train import train

    startup.ended(IMPORTS)
    train(config, startup)


def main() -> NoReturn:
    """Run the command; end the process with the error's exit code and one line that says what is wrong."""
    try:
        command.main(standalone_mode=False)
        code = 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        code = INTERRUPTED
    except CkptoolError as error:
        code = _report(error)
    except OSError as error:
        code = _report(as_storage_error(error))
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # threads of a communicator whose peers are gone may never end: don't wait for them
    sys.exit(0)


def _report(error: CkptoolError) -> int:
    if os.environ.get("CKPTOOL_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    rank = os.environ.get("RANK")
    click.echo(f"{f'rank {rank}: ' if rank else ''}error: {error}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)
    return error.exit_code


def _quiet_libraries() -> None:
    """Let them say errors only. To be called before they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # When rank 0 ends first, the other ranks' stores warn with 40 lines of C++ frames each, above the one line of ours.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # transformers imports torchao where it is installed, which warns on each rank of kernels that it can't load.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
