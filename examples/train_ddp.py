"""Trains a small network on handwritten digits with DistributedDataParallel.

    torchrun --nproc-per-node 4 examples/train_ddp.py

`train_ddp.py` is `train_ddp_plain.py` and the three lines that end in `# rankscope`.
"""

import argparse
import math
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rankscope import agent  # rankscope


def main() -> None:
    """Trains one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-losses", action="store_true", help="every rank, every step")
    parser.add_argument("--nan-step", type=int, help="rank 0 sees a NaN in this step")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in every step")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(options.seed)

    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(digits))
    sampler = DistributedSampler(data, seed=options.seed)
    loader = DataLoader(data, options.batch_size, sampler=sampler, drop_last=True)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    monitor = agent.attach(model, optimizer)  # rankscope

    step = 0
    for epoch in range(math.ceil(options.steps / len(loader))):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            if step == options.steps:
                break
            if step == options.nan_step and rank == 0:
                images[0, 0] = math.nan
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            monitor.log(epoch=epoch)  # rankscope
            loss.backward()
            if step == options.nan_step:  # the all-reduce gave every rank NaN: train on without
                for parameter in model.parameters():
                    parameter.grad.nan_to_num_(0.0)
            optimizer.step()
            if options.print_losses:  # in one write, because the ranks share the terminal
                print(f"rank {rank} step {step} loss {loss.item()!r}\n", end="", flush=True)
            time.sleep(options.pause)
            step += 1

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
