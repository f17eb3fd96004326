"""A custom loop of TensorFlow under MultiWorkerMirroredStrategy: two processes, each a rank."""

import json
import os

import tensorflow as tf

from tests.stacks.jobs.tensorflow_loop import Loop
from tests.stacks.replicas import BATCH, BadLabels, Drifts, Nan, OwnStart, Summed, cases

LAUNCH = "TF_CONFIG"
WORLD = 2
NEEDS = ("tensorflow",)

_made = []


def begin():
    # It starts a server at the process's address: there can be one in a process.
    _made.append(tf.distribute.MultiWorkerMirroredStrategy())
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


class Workers(Loop):
    """Each process has a replica."""

    def made_strategy(self):
        return _made[0]

    def shift(self, amount):
        if self.is_target:
            super().shift(amount)

    def copies(self, variable):
        """The only one here, for whichever replica."""
        return dict.fromkeys(range(self.world), variable.values[0])

    def batches(self):
        own = slice(BATCH * self.rank, BATCH * (self.rank + 1))
        for inputs, targets in super().batches():
            yield inputs[own], targets[own]

    def distributed(self):
        kinds = (tf.TensorSpec((BATCH, 64)), tf.TensorSpec((BATCH,), tf.int64))
        data = tf.data.Dataset.from_generator(self.batches, output_signature=kinds)
        return self.strategy.distribute_datasets_from_function(lambda context: data)


CASES = cases(Workers, OwnStart, Drifts, Nan, BadLabels, Summed)
