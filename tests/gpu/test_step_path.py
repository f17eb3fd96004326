"""On a real device: no step waits for it, and the training comes out as without the agent."""

import collections

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rankscope.agent import guard
from rankscope.agent.fingerprint import FingerprintPlan
from tests.support.language_model import LanguageModel, counting, loss_of
from tests.support.watching import Watching

DEVICE = torch.device("cuda")
TOKENS, LENGTH, BATCH = 64, 33, 8
# What a host thread waits in.
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@pytest.fixture
def watching(tmp_path):
    torch._dynamo.reset()
    with Watching(tmp_path) as made:
        yield made
    torch.cuda.set_sync_debug_mode("default")


class Trainer:
    """Trains in bf16 with clipping and a schedule; waits for its device nowhere."""

    def __init__(self, compiled="", dtype=torch.bfloat16, width=64):
        torch.manual_seed(0)
        self.dtype = dtype
        self.inner = LanguageModel(width, tokens=TOKENS, length=LENGTH).to(DEVICE)
        self.model = torch.compile(self.inner, mode=compiled) if compiled else self.inner
        self.optimizer = torch.optim.AdamW(self.inner.parameters(), lr=1e-3, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.batches = [counting(BATCH, LENGTH, TOKENS, generator) for _ in range(8)]

    def step(self, index):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", self.dtype):
            loss = loss_of(self.model, self.batches[index % len(self.batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.inner.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def train(self, steps, first=0):
        return [self.step(first + i).detach() for i in range(steps)]


def test_no_step_waits_for_its_device(watching):
    trainer = Trainer()
    trainer.train(3)
    torch.cuda.synchronize()
    monitor = watching.attach(trainer.inner, trainer.optimizer)
    torch.cuda.set_sync_debug_mode("error")
    for index in range(40):
        loss = trainer.step(3 + index)
        monitor.log(mine=loss.detach() * 2)
    torch.cuda.set_sync_debug_mode("default")
    found = watching.points("loss")
    # The optimizer has taken three steps before.
    assert set(found) == set(range(3, 43))
    assert watching.points("mine")[42] == pytest.approx(2 * found[42], rel=1e-6)
    assert set(watching.model_digests("parameters")) == set(range(3, 43))


def test_the_driver_sees_no_more_waits_than_without(watching):
    waits = {}
    for watched in (False, True):
        trainer = Trainer()
        if watched:
            watching.attach(trainer.inner, trainer.optimizer)
        trainer.train(10)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            trainer.train(20, first=10)
        names = collections.Counter(e.name for e in seen.events())
        waits[watched] = {name: names[name] for name in WAITS}
        assert names["cudaLaunchKernel"] + names["cuLaunchKernel"] > 0
    assert waits[True] == waits[False]


def test_the_device_runs_on_while_the_host_is_ahead(watching):
    trainer = Trainer()
    watching.attach(trainer.inner, trainer.optimizer)
    trainer.train(10)
    still = []
    # The first time memory is made for what is under way, in which torch itself may wait.
    for turn in range(2):
        torch.cuda.synchronize()
        torch.cuda._sleep(int(3e9))  # a second and more
        # Few: after a thousand launches the driver itself waits until some of them are done.
        trainer.train(2, first=10 + 2 * turn)
        event = torch.cuda.Event()
        event.record()
        still.append(not event.query())
    torch.cuda.synchronize()
    assert still[-1], "a step has waited for the device"
    assert set(watching.points("loss")) == set(range(14))


@pytest.fixture
def repeatable():
    """The same operations give the same bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("compiled", ["", "default", "reduce-overhead"])
def test_parameters_come_out_as_without(watching, repeatable, compiled):
    ends = []
    for watched in (False, True):
        torch._dynamo.reset()
        trainer = Trainer(compiled)
        if watched:
            watching.attach(trainer.model, trainer.optimizer)
        trainer.train(24)
        ends.append([p.detach().clone() for p in trainer.inner.parameters()])
    for plain, seen in zip(*ends, strict=True):
        assert torch.equal(seen, plain)
    assert set(watching.points("loss")) == set(range(24))
    first = watching.points("loss")
    assert first[23] < first[0]


def test_what_is_posted_is_what_the_device_holds(watching):
    trainer = Trainer()
    watching.attach(trainer.inner, trainer.optimizer)
    losses = trainer.train(6)
    found = watching.points("loss")
    assert [found[i] for i in range(6)] == pytest.approx([float(v) for v in losses], rel=1e-6)
    last = watching.digests("parameters")[5]
    named = {n: p.detach().cpu() for n, p in trainer.inner.named_parameters()}
    host = FingerprintPlan([*named], [*named.values()]).compute([*named.values()], sketches=False)
    assert last == dict(zip(named, host.digests.tolist(), strict=True))


@pytest.mark.parametrize("micro", [1, 3])
def test_local_gradients_are_those_of_the_step(watching, micro):
    trainer = Trainer(width=320)  # large ones and small ones
    watching.attach(trainer.inner, trainer.optimizer)
    held = []
    for index in range(6):
        trainer.optimizer.zero_grad()
        for part in range(micro):
            (loss_of(trainer.model, trainer.batches[(index + part) % 8]) / micro).backward()
        norms = [p.grad.norm() for p in trainer.inner.parameters()]
        held.append(float(torch.stack(norms).norm()))
        trainer.optimizer.step()
    found = watching.points("grad_norm_local")
    # Of several micro-batches those of large tensors are known by sketches, to 9 % each.
    within = 1e-3 if micro == 1 else 0.2
    assert [found[i] for i in range(6)] == pytest.approx(held, rel=within)


def test_a_loss_scaler_on_a_device(watching):
    trainer = Trainer(dtype=torch.float16)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    watching.attach(trainer.inner, trainer.optimizer)
    for index in range(12):
        trainer.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(trainer.model, trainer.batches[index % 8])
        scaler.scale(loss if index != 6 else loss * float("inf")).backward()
        scaler.unscale_(trainer.optimizer)
        torch.nn.utils.clip_grad_norm_(trainer.inner.parameters(), 1.0)
        scaler.step(trainer.optimizer)
        scaler.update()
    scales = watching.points("amp_scale")
    assert scales[min(scales)] == 2.0**14
    assert scales[max(scales)] == 2.0**13


def record(trainer, batch):
    """The whole step in a graph, as torch's documentation has it; and what it computes on."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def step():
        trainer.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(trainer.inner, batch)
        loss.backward()
        trainer.optimizer.step()
        return loss

    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph, loss


def test_a_whole_step_in_a_cuda_graph(watching):
    ends = []
    for watched in (False, True):
        trainer = Trainer()
        trainer.optimizer = torch.optim.AdamW(trainer.inner.parameters(), lr=1e-3, capturable=True)
        if watched:
            watching.attach(trainer.inner, trainer.optimizer)
        graph, loss = record(trainer, trainer.batches[0].clone())
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        ends.append((float(loss), [p.detach().clone() for p in trainer.inner.parameters()]))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-4)
    for plain, seen in zip(ends[0][1], ends[1][1], strict=True):
        torch.testing.assert_close(seen, plain, rtol=1e-4, atol=1e-5)
    assert set(watching.points("loss")) == {0, 1, 2}
    notes = [text for _, text in watching.events("agent.note")]
    assert any("CUDA graph" in text for text in notes)


def test_passes_in_a_cuda_graph_and_steps_outside(watching):
    trainer = Trainer()
    watching.attach(trainer.inner, trainer.optimizer)
    batch = trainer.batches[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            trainer.optimizer.zero_grad(set_to_none=True)
            loss_of(trainer.inner, batch).backward()
            trainer.optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    trainer.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = loss_of(trainer.inner, batch)
        loss.backward()
    for index in range(20):
        batch.copy_(trainer.batches[index % 8])
        graph.replay()
        trainer.optimizer.step()
    assert float(loss) < 4.0
    assert len(watching.model_digests("parameters")) >= 20
    assert not [text for _, text in watching.events("agent.note") if "not seen" in text]


def test_nothing_failed_inside(watching):
    assert not [g.faults for g in guard._guards if g.faults]
