"""The recipes of docs/howto/data.md, with the libraries that they are for."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from ckptool import DataSource, GlobalBatchSampler
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
