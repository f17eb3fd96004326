"""JAX: replicated parameters on two devices of one process, each a rank."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rankscope import agent
from tests.stacks.replicas import BadLabels, Drifts, Nan, OwnStart, Replicated, Summed, cases

LAUNCH = "python"
WORLD = 2
NEEDS = ("jax",)


def begin():
    return 0


class Sharded(Replicated):
    """Under `shard_map`; SGD."""

    chosen = "hidden.kernel"

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

    def shift(self, amount):
        layer, name = self.chosen.split(".")
        held = self.parameters[layer][name]
        copies = [shard.data for shard in held.addressable_shards]
        copies[self.suspects] = copies[self.suspects].at[3, 3].add(amount)
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
        watch = agent.jax.Replicas(self.parameters, **self.options())
        self.sample_all(watch.monitors)
        step_of = self.made_step()
        for step, (inputs, targets) in enumerate(self.batches()):
            self.before_step(step)
            parts = jax.device_put((inputs, targets), self.split)
            self.parameters, loss, local, reduced = step_of(
                self.parameters, *parts, self.divisor(step)
            )
            watch.step(
                loss=loss, parameters=self.parameters, local_gradients=local, gradients=reduced
            )
        watch.close()


CASES = cases(Sharded, OwnStart, Drifts, Nan, BadLabels, Summed)
