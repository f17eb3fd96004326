"""JAX: replicated parameters on two devices of one process, each a rank."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from benchmarks.faultlab.case import Case, Expected
from rankscope import agent

LAUNCH = "python"
WORLD = 2
NEEDS = ("jax",)
BATCH = 16


def begin():
    return 0


class Sharded(Case):
    """Three dense layers on digits under `shard_map`; SGD."""

    id = "healthy"
    what = "a plain training"
    steps = 60
    chosen = "hidden.kernel"

    def expected(self):
        return Expected()

    @property
    def guilty(self):
        """The second device: `numpy.asarray` would see the first one only."""
        return 1

    def build(self):
        draw = np.random.default_rng(self.seed)
        sizes = {"inner": (64, 32), "hidden": (32, 32), "head": (32, 10)}
        plain = {
            name: {
                "kernel": (draw.standard_normal(size) / size[0] ** 0.5).astype("float32"),
                "bias": np.zeros(size[1], "float32"),
            }
            for name, size in sizes.items()
        }
        self.mesh = Mesh(np.array(jax.devices()), ("data",))
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.split = NamedSharding(self.mesh, PartitionSpec("data"))
        self.parameters = jax.device_put(plain, self.everywhere)

    def batches(self):
        """Of both devices: the first half of the rows is the first one's."""
        images, labels = load_digits(return_X_y=True)
        images = ((images - images.mean()) / images.std()).astype("float32")
        draw = np.random.default_rng(self.seed)
        for step in range(self.length):
            rows = draw.integers(0, len(images), WORLD * BATCH)
            inputs, targets = images[rows], labels[rows]
            self.spoil(step, inputs[BATCH:], targets[BATCH:])
            yield step, inputs, targets

    def spoil(self, step, inputs, targets):
        """Changes the guilty device's part of a batch in place."""

    def before_step(self, step):
        """A step begins."""

    def divisor(self, step):
        """Of the summed gradients."""
        return float(self.world)

    def shift(self, amount):
        """Changes an element of the guilty device's copy of an array."""
        layer, name = self.chosen.split(".")
        held = self.parameters[layer][name]
        copies = [shard.data for shard in held.addressable_shards]
        copies[self.guilty] = copies[self.guilty].at[3, 3].add(amount)
        self.parameters[layer][name] = jax.make_array_from_single_device_arrays(
            held.shape, held.sharding, copies
        )

    def made_step(self):
        def loss_of(parameters, inputs, targets):
            h = inputs
            for name in ("inner", "hidden"):
                h = jax.nn.relu(h @ parameters[name]["kernel"] + parameters[name]["bias"])
            logits = h @ parameters["head"]["kernel"] + parameters["head"]["bias"]
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1)
            return -chosen.mean()

        def one(parameters, inputs, targets, divisor):
            loss, local = jax.value_and_grad(loss_of)(parameters, inputs, targets)
            reduced = jax.tree.map(lambda g: jax.lax.psum(g, "data") / divisor, local)
            new = jax.tree.map(lambda p, g: p - 0.1 * g, parameters, reduced)
            return new, loss[None], jax.tree.map(lambda g: g[None], local), reduced

        every, data = PartitionSpec(), PartitionSpec("data")
        return jax.jit(
            jax.shard_map(
                one,
                mesh=self.mesh,
                in_specs=(every, data, data, every),
                out_specs=(every, data, data, every),
                # Whether what is called replicated is equal is what is to be found out.
                check_vma=False,
            )
        )

    def train(self):
        self.build()
        setting = self.setting
        options = {"overhead": 1.0} if setting.full else {}
        watch = agent.jax.Replicas(
            self.parameters, server=setting.server, run=setting.run, project="stacks", **options
        )
        for monitor in watch.monitors:
            monitor._schedule.ask_dense(10**9)
        step_of = self.made_step()
        for step, inputs, targets in self.batches():
            self.before_step(step)
            parts = jax.device_put((inputs, targets), self.split)
            self.parameters, loss, local, reduced = step_of(
                self.parameters, *parts, self.divisor(step)
            )
            watch.step(
                loss=loss, parameters=self.parameters, local_gradients=local, gradients=reduced
            )
        watch.close()


class OwnStart:
    """A copy that is another one from the beginning."""

    id = "own-start"
    what = "one device begins with another value of an element"
    onset = 0

    def build(self):
        super().build()
        self.shift(0.01)

    def expected(self):
        return Expected(
            kinds=("desync.parameters",),
            stages=("start",),
            ranks=self.all(),
            tensors=frozenset({self.chosen}),
            severity="critical",
        )


class Drifts:
    """A copy that is not like the other."""

    id = "drift"
    what = "before one step an element of one device's copy of an array changes"

    def before_step(self, step):
        if step == self.at:
            self.shift(0.125)

    def expected(self):
        return Expected(kinds=("desync.parameters",), ranks=self.odd_one(), step=self.at)


class Nan:
    """Inputs that are no numbers."""

    id = "nan"
    what = "at one step one device's part of the batch holds a NaN"

    def spoil(self, step, inputs, targets):
        if step == self.at:
            inputs[0, 0] = np.nan

    def expected(self):
        return Expected(
            kinds=("loss.nonfinite", "gradient.nonfinite"), ranks=self.one(), step=self.at
        )


class BadLabels:
    """Labels that do not belong to their inputs."""

    id = "bad-labels"
    what = "from one step on the labels of one device's part are shuffled"
    steps = 200
    onset = 100

    def spoil(self, step, inputs, targets):
        if step >= self.at:
            targets[:] = np.roll(targets, 5)

    def expected(self):
        return Expected(
            kinds=("rank.loss_outlier", "rank.gradient_outlier"),
            ranks=self.odd_one(),
            step=self.at,
            tolerance=50,
        )


class Summed:
    """A sum where a mean was meant."""

    id = "summed"
    what = "from one step on the summed gradients are not divided by the number of devices"

    def divisor(self, step):
        return 1.0 if step >= self.at else super().divisor(step)

    def expected(self):
        return Expected(kinds=("reduction.wrong",), ranks=self.everybody(), step=self.at)


FAULTS = (OwnStart, Drifts, Nan, BadLabels, Summed)
CASES = [Sharded, *(type(f"{f.__name__}Sharded", (f, Sharded), {}) for f in FAULTS)]
