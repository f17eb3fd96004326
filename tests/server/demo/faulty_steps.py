"""A rank that trains six steps with each of some faults and writes down what every step left.

faulty_steps.py FOLDER RANK STEP TENSOR FAULT...
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.optim import optimizer as optimizers

from rankscope.server.demo import training
from rankscope.server.demo.faults import FAULTS, Injection
from rankscope.server.demo.injection import INJECTORS


def copies(optimizer, what):
    names = [name for name, _ in training.DigitsNet().named_parameters()]
    tensors = [what(p).clone() for p in optimizer.param_groups[0]["params"]]
    return dict(zip(names, tensors, strict=True))


def main():
    folder, suspects, step, tensor, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=training.COLLECTIVE_TIMEOUT)
    rank = dist.get_rank()
    before, after = [], []
    optimizers.register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: before.append(
            {
                "parameters": copies(optimizer, lambda p: p.detach()),
                "gradients": copies(optimizer, lambda p: p.grad),
                "lr": optimizer.param_groups[0]["lr"],
            }
        )
    )
    optimizers.register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: after.append(copies(optimizer, lambda p: p.detach()))
    )
    for name in names:
        before.clear()
        after.clear()
        injection = Injection(FAULTS[name], rank=int(suspects), step=int(step), tensor=tensor)
        fault = INJECTORS[name](injection, rank=rank, seed=7)
        training.train(fault=fault, rank=rank, steps=6, seed=7)
        torch.save({"before": before, "after": after}, f"{folder}/{name}.{rank}.pt")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
