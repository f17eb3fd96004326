"""TensorFlow's ParameterServerStrategy: a coordinator, a parameter server, three workers."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from rankscope import agent
from tests.lab.faults.case import Case, Expected

LAUNCH = "TF_CONFIG, coordinated"
WORLD = 4
NEEDS = ("tensorflow",)
BATCH = 16

_made = []


def begin():
    # There can be one in a process.
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(cluster)
    _made.append(tf.distribute.coordinator.ClusterCoordinator(strategy))
    return 0


class Served(Case):
    """Two dense layers on digits; workers apply their gradients as they come."""

    id = "healthy"
    what = "a plain training"
    # Long enough for four pushes of the slow worker, with 30 versions to each.
    steps = 320

    def expected(self):
        return Expected()

    @property
    def suspects(self):
        """A worker."""
        return 1 + super().suspects % (self.world - 1)

    def late(self, version):
        """Whether the suspects worker is at a version after the onset, as a tensor."""
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return tf.logical_and(worker + 1 == self.suspects, version >= self.at)

    def loss_of(self, loss, version):
        """A loss as it is reported, and derived."""
        return loss

    def rate(self, version):
        """Learning rate."""
        return 0.05

    def wait(self, iterations, version):
        """Between gradient and push."""

    def train(self):
        coordinator, setting = _made[0], self.setting
        strategy = coordinator.strategy
        draw = np.random.default_rng(self.seed)
        with strategy.scope():
            weights = [
                tf.Variable((draw.standard_normal(size) / size[0] ** 0.5).astype("float32"))
                for size in ((64, 32), (32, 10))
            ]
            iterations = tf.Variable(0, dtype=tf.int64)
        images, labels = load_digits(return_X_y=True)
        images = ((images - images.mean()) / images.std()).astype("float32")

        def dataset(context):
            kept = tf.data.Dataset.from_tensor_slices((images, labels.astype("int64")))
            return kept.shuffle(len(images), seed=self.seed).repeat().batch(BATCH)

        # Traced once for each worker.
        @tf.function
        def per_worker():
            return strategy.distribute_datasets_from_function(dataset)

        batches = iter(coordinator.create_per_worker_dataset(per_worker))

        @tf.function
        def step(iterator):
            inputs, targets = next(iterator)
            version = tf.identity(iterations)
            with tf.GradientTape() as tape:
                logits = tf.nn.relu(inputs @ weights[0]) @ weights[1]
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
                loss = self.loss_of(tf.reduce_mean(each), version)
            gradients = tape.gradient(loss, weights)
            self.wait(iterations, version)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(self.rate(version) * gradient)
            iterations.assign_add(1)
            return loss

        watch = agent.tensorflow.Coordinated(
            coordinator,
            iterations,
            server=setting.server,
            run=setting.run,
            project="stacks",
            overhead=1.0,
        )
        for _ in range(self.length):
            watch.schedule(step, args=(batches,))
        watch.join()
        watch.close()


class _Fault:
    """Steps that are under way when it begins end after it."""

    def near(self, *kinds, ranks):
        return Expected(kinds=kinds, ranks=ranks, step=self.at, tolerance=8 * self.world)


class Nan(_Fault):
    """It is applied, and then every worker's is none."""

    id = "nan"
    what = "from one version on one worker's loss is NaN"

    def loss_of(self, loss, version):
        return loss * tf.where(self.late(version), np.nan, 1.0)

    def expected(self):
        # Often no other worker pulls the same version: then it is every loss there is.
        return self.near("loss.nonfinite", ranks=(*self.one(), frozenset()))


class Slow(_Fault):
    """Its gradients are old when they arrive."""

    id = "slow-worker"
    what = "from one version on one worker pushes when 30 more versions have been made"

    def wait(self, iterations, version):
        # The others alone make all versions but one for each worker.
        until = tf.minimum(version + 30, self.length - self.world)
        until = tf.where(self.late(version), until, 0)
        tf.while_loop(lambda now: now < until, lambda now: (tf.identity(iterations),), (version,))

    def expected(self):
        return self.near("push.stale", ranks=self.one())


class HighRate(_Fault):
    """For all of them: the weights are one."""

    id = "high-rate"
    what = "from one version on the learning rate is 100 times as high"

    def rate(self, version):
        return tf.where(version >= self.at, 5.0, 0.05)

    def expected(self):
        kinds = ("loss.spike", "loss.diverging", "loss.nonfinite")
        return self.near(*kinds, ranks=self.everybody())


CASES = [Served, *(type(f"{f.__name__}Served", (f, Served), {}) for f in (Nan, Slow, HighRate))]
