"""The recipes of docs/howto/data.md, with the libraries that they are for."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from ckptool import DataSource, GlobalBatchSampler
from ckptool.cli.main import run as run_command
from ckptool.core.position import DataPosition
from tests.tiny_models import llama

NUM_SAMPLES = 20


class Rows(Dataset):
    """Rows of tokens that remember which were asked for."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        self.asked.append(index)
        tokens = torch.arange(8) + index
        return {"input_ids": tokens, "labels": tokens}


class CountSteps(TrainerCallback):
    """Keeps the sampler's position beside the Trainer's own checkpoints."""

    def __init__(self, sampler):
        self.sampler = sampler

    def on_step_end(self, args, state, control, **kwargs):
        self.sampler.step()

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            torch.save(self.sampler.state_dict(), folder / "data_position.pt")


class OrderedTrainer(Trainer):
    """Takes the loader as it is: the sampler has shared the samples among the ranks, so accelerate must not again."""

    def __init__(self, *args, sampler, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampler = sampler

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_sampler=self.sampler, collate_fn=self.data_collator)


def order(numbers):
    position = DataPosition.begin([DataSource("data", NUM_SAMPLES)], seq_len=1, seed=0, global_batch_size=1)
    return [unit.index for unit in position.units(numbers)]


def train(folder, num_steps, resume=None):
    rows = Rows()
    sampler = GlobalBatchSampler(
        NUM_SAMPLES, global_batch_size=4, micro_batch_size=2, rank=0, world_size=1, num_steps=9
    )
    if resume:
        sampler.load_state_dict(torch.load(folder / resume / "data_position.pt"))
    arguments = TrainingArguments(
        folder,
        max_steps=num_steps,
        save_steps=3,
        gradient_accumulation_steps=sampler.num_micro_batches,
        ignore_data_skip=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = OrderedTrainer(
        llama(vocab_size=64), arguments, train_dataset=rows, sampler=sampler, callbacks=[CountSteps(sampler)]
    )
    trainer.train(resume_from_checkpoint=str(folder / resume) if resume else None)
    return rows.asked


def test_the_hugging_face_trainer_resumes_without_repeating_or_skipping(tmp_path):
    pytest.importorskip("accelerate")
    assert train(tmp_path, 5)[:20] == order(range(20))
    assert train(tmp_path, 9, resume="checkpoint-3")[:24] == order(range(12, 36))


def lightning_run(folder, num_steps, resume=None):
    lightning = pytest.importorskip("lightning.pytorch")

    class CountLightningSteps(lightning.Callback):
        """Keeps the sampler's position in Lightning's own checkpoints."""

        def __init__(self, sampler):
            self.sampler = sampler

        def on_train_batch_end(self, trainer, *args, **kwargs):
            while self.sampler.position.num_steps < trainer.global_step:
                self.sampler.step()

        def state_dict(self):
            return self.sampler.state_dict()

        def load_state_dict(self, state_dict):
            self.sampler.load_state_dict(state_dict)

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(8, 1)

        def training_step(self, batch, batch_index):
            return self.model(batch["input_ids"].float()).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    rows = Rows()
    sampler = GlobalBatchSampler(NUM_SAMPLES, global_batch_size=4, micro_batch_size=2, rank=0, world_size=1)
    save = lightning.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=num_steps,
        accumulate_grad_batches=sampler.num_micro_batches,
        use_distributed_sampler=False,
        callbacks=[CountLightningSteps(sampler), save],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(rows, batch_sampler=sampler)
    trainer.fit(Model(), loader, ckpt_path=folder / resume if resume else None)
    assert trainer.global_step == sampler.position.num_steps == num_steps
    return rows.asked


def test_lightning_resumes_without_repeating_or_skipping(tmp_path):
    assert lightning_run(tmp_path, 5)[:20] == order(range(20))
    assert lightning_run(tmp_path, 9, resume="step=3.ckpt")[:24] == order(range(12, 36))


def titan_loader(rank, world_size):
    titan = pytest.importorskip("torchtitan.components.dataloader")

    class OrderedLoader(titan.BaseDataLoader):
        """torchtitan saves between steps, when all that it has taken is trained; so what was given out is saved."""

        @dataclass(kw_only=True, slots=True)
        class Config(titan.BaseDataLoader.Config):
            global_batch_size: int

        def __init__(self, config, *, dp_rank, dp_world_size, local_batch_size, **_):
            dataset = Rows()
            self.sampler = GlobalBatchSampler(
                len(dataset),
                global_batch_size=config.global_batch_size,
                micro_batch_size=local_batch_size,
                rank=dp_rank,
                world_size=dp_world_size,
            )
            self.loader = DataLoader(dataset, batch_sampler=self.sampler)

        def __iter__(self):
            for number, batch in enumerate(self.loader, start=1):
                if number % self.sampler.num_micro_batches == 0:
                    self.sampler.step()
                yield {"input": batch["input_ids"]}, batch["labels"]

        def state_dict(self):
            return self.sampler.state_dict()

        def load_state_dict(self, state_dict):
            self.sampler.load_state_dict(state_dict)

    # As torchtitan's Trainer builds it.
    return OrderedLoader.Config(global_batch_size=4).build(
        dp_world_size=world_size,
        dp_rank=rank,
        tokenizer=None,
        seq_len=8,
        local_batch_size=1,
        snapshot_every_n_steps=None,
    )


def test_torchtitans_loader_goes_on_on_another_number_of_ranks(tmp_path, capsys):
    """As `train_step` takes batches, and the checkpointer saves `dataloader` between steps."""
    trained, path = [], tmp_path / "step-0"
    for world_size, num_steps in ((2, 3), (4, 2), (1, 4)):
        loaders = [titan_loader(rank, world_size) for rank in range(world_size)]
        if trained:
            for loader in loaders:
                dcp.load({"dataloader": loader}, checkpoint_id=path, no_dist=True)
        items = [iter(loader) for loader in loaders]
        for _ in range(num_steps * loaders[0].sampler.num_micro_batches):
            trained += [int(next(item)[0]["input"][0, 0]) for item in items]
        path = tmp_path / f"step-{len(trained) // 4}"
        dcp.save({"dataloader": loaders[-1]}, checkpoint_id=path, no_dist=True)
    assert trained == order(range(36))
    assert run_command(["data", "show", str(path), "--quiet"]) == 0
    assert capsys.readouterr().out == "36\n"
    assert run_command(["data", "seek", str(path), "--to", "unit:8", "--quiet"]) == 0
    loader = titan_loader(0, 1)
    dcp.load({"dataloader": loader}, checkpoint_id=path, no_dist=True)
    assert [int(batch["input"][0, 0]) for (batch, _), _ in zip(loader, range(8), strict=False)] == order(range(8, 16))
    assert run_command(["data", "verify", str(path)]) == 0
