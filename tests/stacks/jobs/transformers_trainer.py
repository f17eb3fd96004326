"""Transformers: `Trainer.train` under torchrun."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from rankscope import agent
from tests.lab.faults.training import sample_all
from tests.stacks.faults import (
    Flip,
    Inside,
    NotANumber,
    OwnGradient,
    OwnRate,
    SameData,
    begin,
    cases,
)

LAUNCH = "torchrun"
WORLD = 2
NEEDS = ("transformers", "torch")
__all__ = ["CASES", "LAUNCH", "NEEDS", "WORLD", "begin"]


class Model(nn.Module):
    """Returns its loss, as models of Transformers do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs, labels):
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Batches(IterableDataset):
    """Of one rank."""

    def __init__(self, case):
        self.case = case

    def __iter__(self):
        while True:
            inputs, labels = self.case.next_batch()
            yield {"inputs": inputs, "labels": labels}


class OwnLoader(Trainer):
    """Each rank reads what its case says: nothing is dealt out anew."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=None)


class Driver(TrainerCallback):
    """What breaks a case, in the places that the Trainer has for it."""

    def __init__(self, case, watch):
        self.case, self.watch = case, watch

    def on_train_begin(self, args, state, control, **kwargs):
        sample_all(self.watch.monitor, self.case.setting)

    def on_step_begin(self, args, state, control, **kwargs):
        self.case.before_step()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.case.clip()

    def on_step_end(self, args, state, control, **kwargs):
        self.case.step += 1


class Trained(Inside):
    """`Model` has the model as its `net`."""

    def train(self):
        self.prepare()
        watch = agent.transformers.RankscopeCallback(**self.options())
        trainer = OwnLoader(
            model=Model(self.net),
            args=TrainingArguments(
                output_dir=self.setting.folder,
                max_steps=self.length,
                use_cpu=True,
                ddp_backend="gloo",
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Batches(self),
            optimizers=(self.optimizer, torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)),
            callbacks=[watch, Driver(self, watch)],
        )
        trainer.train()


CASES = cases(Trained, Flip, OwnGradient, OwnRate, SameData, NotANumber)
