"""Lightning: `Trainer.fit` with the strategy `ddp`."""

import logging

import lightning

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
NEEDS = ("lightning", "torch")
__all__ = ["CASES", "LAUNCH", "NEEDS", "WORLD", "begin"]

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """A case's model and steps, in the places that Lightning has for them."""

    def __init__(self, case, watch):
        super().__init__()
        self.net = case.net
        # Neither is a part of the model.
        self.around = [case, watch]

    @property
    def case(self):
        return self.around[0]

    def configure_optimizers(self):
        self.case.optimizer = self.case.make_optimizer(self.net.parameters())
        return self.case.optimizer

    def on_train_start(self):
        sample_all(self.around[1].monitor, self.case.setting)

    def on_train_batch_start(self, batch, batch_idx):
        self.case.before_step()

    def training_step(self, batch, batch_idx):
        inputs, targets = self.case.batch(*batch)
        return self.case.criterion(self.net(inputs), targets)

    def on_before_optimizer_step(self, optimizer):
        self.case.clip()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.case.step += 1


class Batches:
    """As they are: Lightning asks for one before the step before it is done."""

    def __init__(self, case):
        self.case = case

    def __iter__(self):
        inputs, targets = self.case.training_set
        for rows in self.case._source:
            yield inputs[rows], targets[rows]


class Fit(Inside):
    """`Module` has the model as its `net`."""

    def train(self):
        self.prepare()
        watch = agent.lightning.RankscopeCallback(**self.options())
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=self.world,
            strategy="ddp",
            max_steps=self.length,
            callbacks=[watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(Module(self, watch), Batches(self))


CASES = cases(Fit, Flip, OwnGradient, OwnRate, SameData, NotANumber)
