"""A program that prints what a thread is said to do while it waits for a worker of a DataLoader.

A process of its own: the worker is a fork, and a fork of a process that has run hundreds of other
tests inherits what those left to be finalized.
"""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.data import DataLoader, Dataset

from rankscope.agent.process.thread_phase import phase_of

LONGEST = 30


class Stops(Dataset):
    def __init__(self, reached, go_on):
        self.reached, self.go_on = reached, go_on

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.reached.set()
        assert self.go_on.wait(LONGEST)
        return torch.ones(1)


def main():
    fork = multiprocessing.get_context("fork")
    reached, go_on = fork.Event(), fork.Event()
    loader = DataLoader(Stops(reached, go_on), num_workers=1, multiprocessing_context="fork")
    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(threading.get_ident).result()
        loaded = pool.submit(lambda: list(loader))
        try:
            assert reached.wait(LONGEST)
            print(phase_of(trainer), flush=True)
        finally:
            go_on.set()
        loaded.result(LONGEST)


if __name__ == "__main__":
    main()
