"""An asynchronous parameter server over `send` and `recv`: every worker at its own pace."""

import torch
import torch.distributed as dist

from rankscope import agent
from tests.lab.faults.case import Expected
from tests.lab.faults.training import Training, sample_all
from tests.stacks.faults import begin, cases
from tests.stacks.options import agent_options

LAUNCH = "torchrun"
WORLD = 4
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]

# What a worker asks for, and whether there is more to do.
PUSH, PULL, LEAVE = 0, 1, 2
# Of headers and of what follows them.
HEAD, BODY = 0, 1


class Model(Training):
    """What server and workers have in common, whatever carries the messages."""

    steps = 240
    lr = 1e-3

    def wrap(self, net):
        return net

    def share(self):
        return max(self.rank - 1, 0), self.world - 1

    @property
    def suspects(self):
        """A worker."""
        return 1 + super().suspects % (self.world - 1)

    def is_late(self, version):
        """Whether a version is after the onset, on the suspect rank."""
        return self.is_target and version >= self.at

    def loses(self, worker, version):
        """Whether the server loses a push."""
        return False

    def pulls(self, version):
        """Whether a worker that holds a version asks for a newer one."""
        return True

    def damage(self, version):
        """What happens to a copy on the way."""

    def weights(self):
        return {name: p.detach() for name, p in self.net.named_parameters()}

    def flat(self):
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])

    @torch.no_grad()
    def take(self, flat):
        own = list(self.net.parameters())
        for parameter, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
            parameter.copy_(part.view_as(parameter))

    @property
    def options(self):
        return agent_options(self.setting)

    def train(self):
        self.prepare()
        if self.rank:
            watch = agent.parameter_server.Worker(**self.options)
        else:
            watch = agent.parameter_server.Server(self.weights, **self.options)
        sample_all(watch.monitor, self.setting)
        with watch:
            (self.work if self.rank else self.serve)(watch)

    def apply_push(self, watch, worker, version, flat):
        """One update of the model; on the server."""
        if self.loses(worker, version):
            return
        own = list(self.net.parameters())
        for parameter, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()
        watch.applied(worker, version)

    def work(self, watch):
        """Pull, compute, push, until the server has had enough."""
        version, goes_on = self.pull(), True
        while goes_on:
            self.damage(version)
            self.net.zero_grad()
            loss = self.forward(self.next_batch())
            loss.backward()
            local = {name: p.grad for name, p in self.net.named_parameters()}
            watch.step(version, loss=loss.item(), parameters=self.weights, local_gradients=local)
            gradient = torch.cat([p.grad.flatten() for p in self.net.parameters()])
            goes_on = self.push(version, gradient)
            if goes_on and self.pulls(version):
                version = self.pull()
        self.leave()


class Messages(Model):
    """Rank 0 takes what comes first, from whomever."""

    def train(self):
        super().train()
        # Or a worker that is done first would pull its next case's weights from this one's server.
        dist.barrier()

    def serve(self, watch):
        there = self.world - 1
        while there:
            head = torch.zeros(2, dtype=torch.int64)
            worker = dist.recv(head, tag=HEAD)
            what, version = head.tolist()
            if what == LEAVE:
                there -= 1
            elif what == PULL:
                dist.send(torch.tensor([watch.version]), worker, tag=HEAD)
                dist.send(self.flat(), worker, tag=BODY)
            else:
                flat = torch.empty(sum(p.numel() for p in self.net.parameters()))
                dist.recv(flat, worker, tag=BODY)
                self.apply_push(watch, worker, version, flat)
                goes_on = watch.version < self.length
                dist.send(torch.tensor([goes_on], dtype=torch.int64), worker, tag=HEAD)

    def ask(self, what, version=0):
        dist.send(torch.tensor([what, version]), 0, tag=HEAD)

    def answer(self):
        head = torch.zeros(1, dtype=torch.int64)
        dist.recv(head, 0, tag=HEAD)
        return int(head)

    def pull(self):
        self.ask(PULL)
        version, flat = self.answer(), self.flat()
        dist.recv(flat, 0, tag=BODY)
        self.take(flat)
        return version

    def push(self, version, gradient):
        self.ask(PUSH, version)
        dist.send(gradient, 0, tag=BODY)
        return bool(self.answer())

    def leave(self):
        self.ask(LEAVE)


class _Fault:
    """It shows at the next version that the suspects worker pulls, and in what comes of that."""

    def near(self, *kinds, **more):
        return Expected(
            kinds=kinds, ranks=self.one(), step=self.at, tolerance=8 * self.world, **more
        )


class NeverPulls(_Fault):
    """A worker that goes on with the weights it has."""

    id = "never-pulls"
    what = "from one version on one worker does not pull any more"

    def pulls(self, version):
        return not self.is_late(version)

    def expected(self):
        return self.near("push.stale", severity="critical")


class Lost(_Fault):
    """One of many."""

    id = "lost-push"
    what = "the server loses one push of one worker"
    lost = False

    def loses(self, worker, version):
        loses = not self.lost and worker == self.suspects and version >= self.at
        self.lost |= loses
        return loses

    def expected(self):
        return self.near("push.lost")


class WrongPull(_Fault):
    """A damaged copy of a version that others hold as it is."""

    id = "wrong-pull"
    what = "one worker's copy of a tensor is damaged on the way, in one pull"
    damaged = False

    def damage(self, version):
        if self.is_late(version) and not self.damaged:
            self.damaged = True
            self.parameter(self.tensor).data.view(-1)[3] += 0.125

    def expected(self):
        # Often nobody but the server holds the same version.
        ranks = (*self.one(), frozenset({0, self.suspects}))
        return Expected(
            kinds=("desync.parameters",),
            ranks=ranks,
            tensors=frozenset({self.tensor}),
            step=self.at,
            tolerance=8 * self.world,
        )


class Nan(_Fault):
    """The server applies what comes of it."""

    id = "nan"
    what = "from one version on one worker's loss is NaN"

    def forward(self, batch):
        loss = super().forward(batch)
        return loss * float("nan") if self.is_late(self.version) else loss

    def damage(self, version):
        self.version = version

    def expected(self):
        return Expected(
            kinds=("loss.nonfinite",),
            # Often no other worker pulls the same version: then it is every loss there is.
            ranks=(*self.one(), frozenset()),
            step=self.at,
            tolerance=8 * self.world,
        )


FAULTS = (NeverPulls, Lost, WrongPull, Nan)
CASES = cases(Messages, *FAULTS)
