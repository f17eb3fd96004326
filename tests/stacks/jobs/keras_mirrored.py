"""Keras `fit` under MirroredStrategy: two replicas on two logical CPUs, each a rank."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from benchmarks.faultlab.case import Case, Expected
from rankscope import agent

LAUNCH = "python"
WORLD = 2
NEEDS = ("tensorflow",)
GAPS = {
    "nan": "gradient.nonfinite asks for the applied gradient's norm: `fit` shows the local one only"
}
BATCH = 16


def begin():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * WORLD
    )
    return 0


class Mirrored(Case):
    """Three dense layers on digits."""

    id = "healthy"
    what = "a plain training"
    steps = 60
    chosen = "net.hidden.kernel"

    def expected(self):
        return Expected()

    @property
    def guilty(self):
        """The second replica: reading by `numpy()` would see the first one only."""
        return 1

    def build(self):
        keras.utils.set_random_seed(self.seed)
        self.strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with self.strategy.scope():
            self.net = keras.Sequential(
                [
                    keras.layers.Input((64,)),
                    keras.layers.Dense(32, activation="relu", name="inner"),
                    keras.layers.Dense(32, activation="relu", name="hidden"),
                    keras.layers.Dense(10, name="head"),
                ],
                name="net",
            )
            self.optimizer = keras.optimizers.Adam(2e-3)

    def batches(self):
        """Of both replicas: the first half of the rows is the first one's."""
        images, labels = load_digits(return_X_y=True)
        images = ((images - images.mean()) / images.std()).astype("float32")
        draw = np.random.default_rng(self.seed)
        for step in range(self.length):
            rows = draw.integers(0, len(images), WORLD * BATCH)
            inputs, targets = images[rows], labels[rows]
            self.spoil(step, inputs[BATCH:], targets[BATCH:])
            yield inputs, targets

    def dataset(self):
        kinds = (tf.TensorSpec((WORLD * BATCH, 64)), tf.TensorSpec((WORLD * BATCH,), tf.int64))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        data = tf.data.Dataset.from_generator(self.batches, output_signature=kinds)
        return data.with_options(options)

    def spoil(self, step, inputs, targets):
        """Changes the guilty replica's part of a batch in place."""

    def before_step(self, step):
        """A step begins."""

    def own(self, name):
        """The guilty replica's copy of a variable."""
        (held,) = [v for v in self.net.trainable_variables if v.path.replace("/", ".") == name]
        return held.value.values[self.guilty]

    def train(self):
        self.build()
        self.net.compile(
            optimizer=self.optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        watch = agent.keras.RankscopeCallback(
            server=self.setting.server, run=self.setting.run, project="stacks", overhead=1.0
        )
        data = self.dataset()
        self.net.fit(data, callbacks=[watch, _Driver(self, watch)], verbose=0)


class _Driver(keras.callbacks.Callback):
    """What breaks a case; and everything is looked at at every step."""

    def __init__(self, case, watch):
        super().__init__()
        self._case, self._watch = case, watch

    def on_train_begin(self, logs=None):
        for monitor in self._watch.monitors:
            monitor._schedule.ask_dense(10**9)

    def on_train_batch_begin(self, batch, logs=None):
        self._case.before_step(batch)


class Drifts:
    """A copy that is not like the other."""

    id = "drift"
    what = "before one step an element of one replica's copy of a variable changes"

    def before_step(self, step):
        if step == self.at:
            copy = self.own(self.chosen)
            change = np.zeros(copy.shape, "float32")
            change[3, 3] = 0.125
            copy.assign_add(change)

    def expected(self):
        return Expected(
            kinds=("desync.parameters",),
            ranks=self.odd_one(),
            tensors=frozenset({self.chosen}),
            step=self.at,
        )


class OwnStart:
    """A copy that is another one from the beginning."""

    id = "own-start"
    what = "one replica begins with another value of a variable"
    onset = 0

    def build(self):
        super().build()
        copy = self.own(self.chosen)
        copy.assign(copy + 0.01)

    def expected(self):
        return Expected(
            kinds=("desync.parameters",),
            stages=("start",),
            ranks=self.all(),
            tensors=frozenset({self.chosen}),
            severity="critical",
        )


class Nan:
    """Inputs that are no numbers."""

    id = "nan"
    what = "at one step one replica's part of the batch holds a NaN"

    def spoil(self, step, inputs, targets):
        if step == self.at:
            inputs[0, 0] = np.nan

    def expected(self):
        return Expected(
            # Of a NaN, TensorFlow's relu makes a zero: the loss need not show it, gradients do.
            kinds=("loss.nonfinite", "gradient.nonfinite"),
            ranks=self.one(),
            step=self.at,
        )


class BadLabels:
    """Labels that do not belong to their inputs."""

    id = "bad-labels"
    what = "from one step on the labels of one replica's part are shuffled"
    steps = 200
    onset = 100

    def spoil(self, step, inputs, targets):
        if step >= self.at:
            targets[:] = np.roll(targets, 5)

    def expected(self):
        return Expected(
            kinds=("rank.loss_outlier",), ranks=self.odd_one(), step=self.at, tolerance=50
        )


FAULTS = (OwnStart, Drifts, Nan, BadLabels)
CASES = [Mirrored, *(type(f"{f.__name__}Fit", (f, Mirrored), {}) for f in FAULTS)]
