"""Keras `fit` under MirroredStrategy: two replicas on two logical CPUs, each a rank."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from rankscope import agent
from tests.stacks.replicas import BATCH, BadLabels, Drifts, Nan, OwnStart, Replicated, cases

LAUNCH = "python"
WORLD = 2
NEEDS = ("tensorflow",)


def begin():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * WORLD
    )
    return 0


class Mirrored(Replicated):
    """Adam."""

    chosen = "net.hidden.kernel"

    def made_strategy(self):
        """Of two replicas."""
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def build(self):
        keras.utils.set_random_seed(self.seed)
        self.strategy = self.made_strategy()
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

    def dataset(self):
        kinds = (tf.TensorSpec((WORLD * BATCH, 64)), tf.TensorSpec((WORLD * BATCH,), tf.int64))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        data = tf.data.Dataset.from_generator(self.batches, output_signature=kinds)
        return data.with_options(options)

    def copies(self, variable):
        """Of a variable, by replica."""
        return variable.values

    def shift(self, amount):
        paths = [v.path.replace("/", ".") for v in self.net.trainable_variables]
        held = self.net.trainable_variables[paths.index(self.chosen)]
        copy = self.copies(held.value)[self.suspects]
        change = np.zeros(copy.shape, "float32")
        change[3, 3] = amount
        copy.assign_add(change)

    def train(self):
        self.build()
        self.net.compile(
            optimizer=self.optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        watch = agent.keras.RankscopeCallback(**self.options())
        self.net.fit(self.dataset(), callbacks=[watch, _Driver(self, watch)], verbose=0)


class _Driver(keras.callbacks.Callback):
    """What breaks a case, in the places that Keras has for it."""

    def __init__(self, case, watch):
        super().__init__()
        self._case, self._watch = case, watch

    def on_train_begin(self, logs=None):
        self._case.sample_all(self._watch.monitors)

    def on_train_batch_begin(self, batch, logs=None):
        self._case.before_step(batch)


CASES = cases(Mirrored, OwnStart, Drifts, Nan, BadLabels)
