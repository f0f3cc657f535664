"""The loss on data that is never trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ckptool import CkptoolError, DataPosition, UsageError
from trainer.config import TrainConfig
from trainer.data import Prepared, TrainingData, prepare
from trainer.loss import batch_loss
from trainer.metrics import Log
from trainer.parallel import Ranks


@dataclass(frozen=True)
class HeldOut:
    """The first units of a held-out source, in an order of its own that never changes."""

    data: TrainingData
    position: DataPosition

    @classmethod
    def open(cls, config: TrainConfig, hf_folder: Path, ranks: Ranks, log: Log) -> HeldOut | None:
        """What --eval-data names; None when it names nothing. Raises UsageError for what has no first units."""
        if not config.eval_data:
            return None
        prepared = ranks.from_rank0(lambda: _prepare(config, hf_folder, log))
        if any(source.corpus is None for source in prepared):
            raise UsageError("--eval-data can't be a stream or a loader", hint="save a part of it to a file")
        data = TrainingData(prepared, config.unit, config.seq_len, hf_folder)
        num_units = min(config.eval_units, sum(source.num_units for source in data.sources))
        return cls(data, data.start(seed=0, global_batch_size=num_units))

    def loss(self, model: PreTrainedModel, ranks: Ranks, micro_batch_size: int) -> float:
        """The mean loss over the labels, in evaluation mode. All ranks take part; no random number is drawn."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
        num_labels = 0
        model.eval()
        with torch.no_grad():
            for batch in self.data.micro_batches(
                self.position, ranks.data_rank, ranks.num_data_ranks, micro_batch_size
            ):
                loss_sum += batch_loss(model, batch, ranks.device)
                num_labels += batch.num_trained()
        model.train()
        total, count = ranks.sum(loss_sum, float(num_labels))
        return total / max(1.0, count)


def _prepare(config: TrainConfig, hf_folder: Path, log: Log) -> list[Prepared]:
    """The sources of --eval-data, which an error names."""
    try:
        return prepare(config.eval_data, config.unit, config.seq_len, hf_folder, config.work, log.say)
    except CkptoolError as error:
        error.args = (f"--eval-data: {error}",)
        raise
