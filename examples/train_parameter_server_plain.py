"""Trains by an asynchronous parameter server: rank 0 serves, each other rank is a worker.

    torchrun --nproc-per-node 3 examples/train_parameter_server.py

`train_parameter_server.py` is `train_parameter_server_plain.py` and the lines that end in
`# rankscope`.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn


def main() -> None:
    """Trains one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits)
    shuffled = torch.Generator().manual_seed(rank)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    criterion = nn.CrossEntropyLoss()
    size = sum(parameter.numel() for parameter in model.parameters())
    # To a worker: the version and whether to go on, then the parameters. To the server: the
    # version of the parameters that the gradient was computed with, then the gradient.
    if rank == 0:
        version, busy = 0, world - 1
        for worker in range(1, world):
            dist.send(torch.tensor([version, 1]), worker, tag=0)
            dist.send(nn.utils.parameters_to_vector(model.parameters()).detach(), worker, tag=1)
        while busy:
            head = torch.zeros(2, dtype=torch.int64)
            gradient = torch.zeros(size)
            worker = dist.recv(head, tag=0)
            dist.recv(gradient, worker, tag=1)
            offset = 0
            for parameter in model.parameters():
                part = gradient[offset : offset + parameter.numel()]
                parameter.grad = part.view_as(parameter)
                offset += parameter.numel()
            optimizer.step()
            version += 1
            goes_on = version < options.steps
            busy -= not goes_on
            dist.send(torch.tensor([version, int(goes_on)]), worker, tag=0)
            dist.send(nn.utils.parameters_to_vector(model.parameters()).detach(), worker, tag=1)
    else:
        images, labels = images[rank - 1 :: world - 1], labels[rank - 1 :: world - 1]
        while True:
            head = torch.zeros(2, dtype=torch.int64)
            flat = torch.zeros(size)
            dist.recv(head, 0, tag=0)
            dist.recv(flat, 0, tag=1)
            if not head[1]:
                break
            nn.utils.vector_to_parameters(flat, model.parameters())
            batch = torch.randperm(len(images), generator=shuffled)[:32]
            optimizer.zero_grad()
            loss = criterion(model(images[batch]), labels[batch])
            loss.backward()
            gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            dist.send(head, 0, tag=0)
            dist.send(gradient, 0, tag=1)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
