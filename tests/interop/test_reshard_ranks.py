"""Ranks of the target mesh, with torch's own reader and DTensors, find in a resharded checkpoint their own bytes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import ckptool
from ckptool.core.mesh import Mesh
from ckptool.ops.reshard import reshard
from tests.spawn import run_ranks
from trainer.optimizer import build_optimizer, optimizer_state

#: "six", "five" and "one" over 4 ranks are field report 22: some ranks have no rows.
SHAPES: dict[str, tuple[int, ...]] = {
    "w": (12, 6),
    "few": (3, 6),
    "six": (6,),
    "five": (5, 2),
    "one": (1, 3),
    "empty": (0, 4),
    "experts": (5, 9, 8),
}


def all_as(*placements: Placement) -> dict[str, list[Placement]]:
    return {name: list(placements) for name in SHAPES}


#: Per mesh: the file of placements, and what a program with such a mesh has for each parameter.
CASES: dict[str, tuple[str, dict[str, list[Placement]]]] = {
    "dp=4": ("", all_as(Shard(0))),
    "dp_replicate=2,dp_shard=2": ("", all_as(Replicate(), Shard(0))),
    "dp_shard=2,tp=2": (
        '[tp]\n"w" = 0\n"few" = 1\n"experts" = -1\n',
        all_as(Shard(0), Replicate())
        | {
            "w": [_StridedShard(0, split_factor=2), Shard(0)],
            "few": [Shard(0), Shard(1)],
            "experts": [Shard(0), Shard(2)],
        },
    ),
    "dp_shard=2,ep=2": (
        '[ep]\n"experts" = 0\n[dp_shard]\n"experts" = 1\n',
        all_as(Shard(0), Replicate()) | {"experts": [Shard(1), Shard(0)]},
    ),
}


def parameters() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


class CountingReader(dcp.FileSystemReader):
    """The stock reader, which reads every chunk that it touches whole; keeps the names of their files."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.num_bytes = 0

    def read_data(self, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            chunk = self.metadata_chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            self.num_bytes += chunk
        return super().read_data(plan, planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().read_metadata(*args, **kwargs)
        self.metadata_chunks = {
            (fqn, tuple(chunk.offsets)): chunk.sizes.numel() * entry.properties.dtype.itemsize
            for fqn, entry in metadata.state_dict_metadata.items()
            for chunk in getattr(entry, "chunks", ())
        }
        return metadata


def template(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    shape, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = torch.full(shape, float("nan"))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def load_all(rank: int, root: str) -> None:
    for text, (_, placements) in CASES.items():
        mesh = Mesh.parse(text)
        device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)
        model = {name: template(t, device_mesh, placements[name]) for name, t in parameters().items()}
        optim = {name: {"exp_avg": template(t, device_mesh, placements[name])} for name, t in parameters().items()}
        reader = CountingReader(f"{root}/{text}")
        dcp.load({"model": model, "optim": {"state": optim}}, storage_reader=reader)
        held = 0
        for name, tensor in parameters().items():
            shape, offsets = compute_local_shape_and_global_offset(tensor.shape, device_mesh, placements[name])
            own = tensor[tuple(slice(a, a + n) for a, n in zip(offsets, shape, strict=True))]
            assert torch.equal(model[name].to_local(), own), (text, name)
            assert torch.equal(optim[name]["exp_avg"].to_local(), own * 2), (text, name)
            held += 2 * own.nbytes
        assert reader.num_bytes == held, f"{text}: rank {rank} reads {reader.num_bytes} bytes and holds {held}"


#: The second one divides by nothing (field report 23).
BLOCK_SIZES = ((6, 16), (17, 5))


class Block(nn.Module):
    def __init__(self, size: int = 6, inner_size: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, inner_size), nn.Linear(inner_size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(hidden))))


def load_fsdp_over_tp(rank: int, checkpoint: str, sizes: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(6)
    model = Block(*sizes)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    state = model.state_dict()
    for tensor in state.values():
        tensor.to_local().fill_(float("nan"))
    reader = CountingReader(checkpoint)
    dcp.load({"model": state}, storage_reader=reader)
    assert isinstance(state["up.weight"].placements[0], _StridedShard)
    for name, tensor in state.items():
        assert torch.equal(tensor.full_tensor(), expected[name]), name
    assert reader.num_bytes == sum(tensor.to_local().nbytes for tensor in state.values())


def load_on_four_ranks(rank: int, root: str) -> None:
    load_all(rank, root)
    for sizes in BLOCK_SIZES:
        load_fsdp_over_tp(rank, f"{root}/fsdp-over-tp-{sizes[0]}", sizes)


def test_stock_load_reads_what_the_rank_holds_on_every_mesh(tmp_path: Path) -> None:
    state = {
        "model": parameters(),
        "optim": {"state": {name: {"exp_avg": tensor * 2} for name, tensor in parameters().items()}},
    }
    dcp.save(state, checkpoint_id=tmp_path / "foreign", no_dist=True)
    for text, (placements, _) in CASES.items():
        (tmp_path / "placements.toml").write_text(placements)
        reshard(
            str(tmp_path / "foreign"),
            str(tmp_path / text),
            mesh=Mesh.parse(text),
            placements=tmp_path / "placements.toml",
        )
    (tmp_path / "tp.toml").write_text('[tp]\n"up.*" = 0\n"down.weight" = 1\n')
    for sizes in BLOCK_SIZES:
        torch.manual_seed(6)
        dcp.save({"model": Block(*sizes).state_dict()}, checkpoint_id=tmp_path / f"one-{sizes[0]}", no_dist=True)
        reshard(
            str(tmp_path / f"one-{sizes[0]}"),
            str(tmp_path / f"fsdp-over-tp-{sizes[0]}"),
            mesh=Mesh.parse("dp_shard=2,tp=2"),
            placements=tmp_path / "tp.toml",
        )
    run_ranks(4, load_on_four_ranks, str(tmp_path))


NUM_ROWS, STEPS_BEFORE = 24, 2


class Language(nn.Module):
    """All float64: transformers' norms and losses go through float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class Training:
    """A tiny model with AdamW on the ranks of `mesh`; the same batch of NUM_ROWS rows each step."""

    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        self.mesh, self.num_ranks = mesh, mesh.size()
        torch.manual_seed(8)
        self.model = Language().to(dtype)
        for block in self.model.blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = build_optimizer(dict(self.model.named_parameters()), lr=0.01, weight_decay=0.1)

    def state(self) -> dict[str, Any]:
        optim = optimizer_state(self.optimizer, dict(self.model.named_parameters()))
        return {"model": self.model.state_dict(), "optim": optim}

    def step(self) -> tuple[float, float]:
        """The batch's loss before the step, and the norm of its gradient."""
        tokens = torch.randint(31, (NUM_ROWS, 12), generator=torch.Generator().manual_seed(7))
        own = tokens[dist.get_rank() :: self.num_ranks]
        # FSDP2 takes the mean over the ranks; that of these losses is the mean over all rows.
        logits = self.model(own[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, own[:, 1:].flatten()) * len(own) * self.num_ranks / NUM_ROWS
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total.item() / self.num_ranks, norm.full_tensor().item()  # type: ignore[attr-defined]


def train_and_save(rank: int, root: str, world_sizes: list[int], dtype: torch.dtype) -> list[tuple[float, float]]:
    """Steps on each number of ranks, saved by plain dcp.save, and what the next step gives without interruption."""
    next_steps = []
    for num_ranks in world_sizes:
        mesh = DeviceMesh("cpu", list(range(num_ranks)))
        if rank < num_ranks:
            run = Training(mesh, dtype)
            for _ in range(STEPS_BEFORE):
                run.step()
            dcp.save(run.state(), checkpoint_id=f"{root}/{num_ranks}", process_group=mesh.get_group())
            next_steps.append(run.step())
        dist.barrier()
    return next_steps


def resume_all(rank: int, root: str, world_sizes: list[int], dtype: torch.dtype) -> list[tuple[float, float]]:
    next_steps = []
    for before, after in itertools.product(world_sizes, repeat=2):
        mesh = DeviceMesh("cpu", list(range(after)))
        if rank < after:
            run = Training(mesh, dtype)
            state = run.state()
            dcp.load(state, checkpoint_id=f"{root}/{before}to{after}", process_group=mesh.get_group())
            run.model.load_state_dict(state["model"])
            next_steps.append(run.step())
        dist.barrier()
    return next_steps


def check_training_goes_on(root: Path, world_sizes: list[int], dtype: torch.dtype, bound: float) -> None:
    uninterrupted = run_ranks(max(world_sizes), train_and_save, str(root), world_sizes, dtype)[0]
    for before, after in itertools.product(world_sizes, repeat=2):
        reshard(str(root / str(before)), str(root / f"{before}to{after}"), mesh=Mesh.of({"dp": after}))
    resumed = run_ranks(max(world_sizes), resume_all, str(root), world_sizes, dtype, limit_seconds=600)[0]
    assert len(resumed) == len(world_sizes) ** 2
    for loss, norm in [*uninterrupted, *resumed]:
        assert abs(loss - uninterrupted[0][0]) <= bound
        assert abs(norm - uninterrupted[0][1]) <= bound
    assert ckptool.verify(str(root / f"{world_sizes[-1]}to{world_sizes[0]}"), level="content").findings == ()


def test_training_goes_on_as_if_uninterrupted(tmp_path: Path) -> None:
    check_training_goes_on(tmp_path, [2, 3], torch.float64, 1e-12)


@pytest.mark.slow
def test_training_goes_on_from_and_to_every_number_of_ranks(tmp_path: Path) -> None:
    check_training_goes_on(tmp_path, list(range(1, 9)), torch.float64, 1e-12)


@pytest.mark.slow
def test_in_bf16_only_the_order_of_sums_differs(tmp_path: Path) -> None:
    """Four units in the last place of bf16, which are 1/64 at a loss of 3.5. The checkpoints are equal bit for bit."""
    check_training_goes_on(tmp_path, [1, 2, 3], torch.bfloat16, 4 / 64)
