"""A custom loop of TensorFlow under MirroredStrategy."""

import tensorflow as tf

from rankscope import agent
from tests.stacks.jobs.keras_mirrored import Mirrored, begin
from tests.stacks.replicas import BadLabels, Drifts, Nan, OwnStart, Summed, cases

LAUNCH = "python"
WORLD = 2
NEEDS = ("tensorflow",)
__all__ = ["CASES", "LAUNCH", "NEEDS", "WORLD", "begin"]


class Loop(Mirrored):
    """Gradients are summed over the replicas and divided by their number by hand."""

    def distributed(self):
        """The data, dealt out to the replicas."""
        return self.strategy.experimental_distribute_dataset(self.dataset())

    def train(self):
        self.build()
        with self.strategy.scope():
            self.optimizer.build(self.net.trainable_variables)
        names = [v.path.replace("/", ".") for v in self.net.trainable_variables]
        watch = agent.keras.Replicas(
            self.net.trainable_variables, strategy=self.strategy, **self.options()
        )
        self.sample_all(watch.monitors)
        data = iter(self.distributed())
        # Among several processes the end of the data is found out by waiting for the others.
        for step in range(self.length):
            inputs, targets = next(data)
            self.before_step(step)
            divisor = tf.constant(self.divisor(step))
            loss, local, reduced = self.one_step(inputs, targets, divisor)
            watch.step(
                loss=loss,
                local_gradients=dict(zip(names, local, strict=True)),
                gradients=dict(zip(names, reduced, strict=True)),
            )
        watch.close()

    @tf.function
    def one_step(self, inputs, targets, divisor):
        def replica(inputs, targets):
            with tf.GradientTape() as tape:
                logits = self.net(inputs, training=True)
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
                loss = tf.reduce_mean(each)
            variables = [v.value for v in self.net.trainable_variables]
            local = tape.gradient(loss, variables)
            context = tf.distribute.get_replica_context()
            reduced = [g / divisor for g in context.all_reduce("sum", local)]
            # Keras sums what each replica returns.
            shares = [g / self.world for g in reduced]
            self.optimizer.apply(shares, self.net.trainable_variables)
            return loss, local, reduced

        return self.strategy.run(replica, args=(inputs, targets))


CASES = cases(Loop, OwnStart, Drifts, Nan, BadLabels, Summed)
