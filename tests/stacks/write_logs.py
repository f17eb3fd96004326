"""Trains a small model by a real framework, with the framework's own logging, healthy or not.

    python -m tests.stacks.write_logs keras|lightning|lightning_csv|transformers FOLDER [FAULT]

FAULT is `rate`: at step 200 of 400 the learning rate becomes 60 times as large. Rankscope has no
part in this: it reads the files afterwards.
"""

from __future__ import annotations

import sys
from pathlib import Path

STEPS, AT, FACTOR = 400, 200, 60.0
RATE, BATCH, INPUTS = 0.05, 32, 8


def _data():
    import numpy as np

    random = np.random.default_rng(0)
    inputs = random.normal(size=(STEPS * BATCH, INPUTS)).astype("float32")
    noise = random.normal(scale=0.3, size=(len(inputs), 1))
    targets = (np.sin(inputs[:, :1]) + inputs[:, 1:2] + noise).astype("float32")
    return inputs, targets


def keras(folder: Path, fault: str) -> None:
    """`tf.keras` with its TensorBoard callback."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(32, activation="tanh"), tf.keras.layers.Dense(1)]
    )
    model.compile(tf.keras.optimizers.SGD(RATE), loss="mse")

    class Raise(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if fault and batch == AT:
                self.model.optimizer.learning_rate.assign(FACTOR * RATE)

    board = tf.keras.callbacks.TensorBoard(str(folder), update_freq=1, write_graph=False)
    inputs, targets = _data()
    model.fit(
        inputs,
        targets,
        batch_size=BATCH,
        epochs=1,
        shuffle=False,
        verbose=0,
        callbacks=[board, Raise()],
        validation_data=(inputs[:512], targets[:512]),
    )


def _lightning(fault: str, logger) -> None:
    import lightning
    import torch

    lightning.seed_everything(0, verbose=False)

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(INPUTS, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
            )

        def training_step(self, batch, number):
            if fault and number == AT:
                for group in self.trainer.optimizers[0].param_groups:
                    group["lr"] = FACTOR * RATE
            inputs, targets = batch
            loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

    inputs, targets = map(torch.from_numpy, _data())
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, targets), batch_size=BATCH
    )
    trainer = lightning.Trainer(
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        devices=1,
    )
    trainer.fit(Model(), loader)


def lightning(folder: Path, fault: str) -> None:
    """Lightning with its TensorBoardLogger."""
    from lightning.pytorch.loggers import TensorBoardLogger

    _lightning(fault, TensorBoardLogger(str(folder), name=None))


def lightning_csv(folder: Path, fault: str) -> None:
    """Lightning with its CSVLogger."""
    from lightning.pytorch.loggers import CSVLogger

    _lightning(fault, CSVLogger(str(folder), name=None))


def transformers(folder: Path, fault: str) -> None:
    """The Trainer of Hugging Face, which saves its state with each checkpoint."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    set_seed(0)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(INPUTS, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
            )

        def forward(self, inputs, labels):
            return {"loss": torch.nn.functional.mse_loss(self.net(inputs), labels)}

    class Raise(TrainerCallback):
        def on_step_begin(self, arguments, state, control, optimizer=None, **rest):
            if fault and state.global_step >= AT:
                for group in optimizer.param_groups:
                    group["lr"] = FACTOR * RATE

    inputs, targets = map(torch.from_numpy, _data())
    rows = [{"inputs": i, "labels": t} for i, t in zip(inputs, targets, strict=True)]
    model = Model()
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder),
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            logging_steps=1,
            save_steps=STEPS,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            max_grad_norm=0.0,
        ),
        train_dataset=rows,
        callbacks=[Raise()],
        optimizers=(torch.optim.SGD(model.parameters(), lr=RATE), None),
    )
    # No schedule of its own: the optimizer's rate is what is raised.
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1.0)
    trainer.train()


WRITERS = {f.__name__: f for f in (keras, lightning, lightning_csv, transformers)}

if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
