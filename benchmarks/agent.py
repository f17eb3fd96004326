"""What the agent costs a step: the same training with and without it, in turns, in one launch.

    python benchmarks/agent.py [--ranks 2] [--blocks 6]

Two gloo ranks train under DistributedDataParallel on the CPU. Blocks of steps with the agent
(default settings, posting to a real server on the same machine) alternate with blocks without, so
that a machine that drifts drifts for both. Reported are medians of rank 0 over all blocks, as
ratios; absolute times belong to the machine they were measured on.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Steps of a block, and how many at its beginning are left out: there the agent samples everything
# and learns what it costs.
STEPS = 400
SKIPPED = 100

WORKLOADS = {
    # name: (width of the network, layers, batch)
    "1 ms step": (64, 2, 32),
    "10 ms step": (512, 4, 128),
    "50 ms step": (1024, 6, 192),
}


def train(blocks: int, server: str) -> None:
    """One rank: all workloads, blocks with and without the agent in turns."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from rankscope import agent

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {}
    for name, (width, layers, batch) in WORKLOADS.items():
        torch.manual_seed(0)
        modules = [nn.Linear(64, width), nn.ReLU()]
        for _ in range(layers):
            modules += [nn.Linear(width, width), nn.ReLU()]
        model = DistributedDataParallel(nn.Sequential(*modules, nn.Linear(width, 10)))
        criterion = nn.CrossEntropyLoss()
        x, y = torch.randn(batch, 64), torch.randint(0, 10, (batch,))
        times = {True: [], False: []}
        for block in range(2 * blocks):
            watched = block % 2 == 0
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
            monitor = None
            if watched:
                run = f"bench-{os.environ['MASTER_PORT']}-{name[:2].strip()}-{block}"
                monitor = agent.attach(model, optimizer, server=server, run=run)
            for step in range(STEPS if width < 1024 else STEPS // 2):
                began = time.perf_counter()
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
                if step >= SKIPPED:
                    times[watched].append(time.perf_counter() - began)
            if monitor is not None:
                monitor.close()
            dist.barrier()
        plain, watched_times = times[False], times[True]
        median = statistics.median(plain)
        results[name] = {
            "step_ms": 1e3 * median,
            "ratio_of_medians": statistics.median(watched_times) / median,
            "ratio_of_p99": quantile(watched_times, 0.99) / quantile(plain, 0.99),
            "steps": len(watched_times),
        }
    if rank == 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        with agent.attach(model, optimizer, server=server, run="bench-log") as monitor:
            scalars = {f"metric_{i}": float(i) for i in range(20)}
            calls = []
            for _ in range(2000):
                began = time.perf_counter()
                monitor.log(**scalars)
                calls.append(time.perf_counter() - began)
        results["monitor.log of 20 scalars"] = {
            "median_us": 1e6 * statistics.median(calls),
            "p99_us": 1e6 * quantile(calls, 0.99),
        }
        sys.stdout.write(json.dumps(results) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that is shutting down


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=6, help="of each kind and workload")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        serve = [str(Path(sys.executable).with_name("rankscope")), "serve", "--port", "0"]
        server = subprocess.Popen(
            [*serve, "--db", f"sqlite:///{folder}/bench.db"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            results = json.loads(launch(options, url, folder))
        finally:
            server.terminate()
            server.wait(20)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for name, figures in results.items():
        print(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()))


def launch(options: argparse.Namespace, url: str, spool: str) -> str:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(options.ranks):
        environment = os.environ | common
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "RANKSCOPE_SPOOL": spool}
        environment["WORLD_SIZE"] = str(options.ranks)
        command = [sys.executable, __file__, "--rank", str(options.blocks), url]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=3600)[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit("a rank failed")
    return outputs[0]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train(int(sys.argv[2]), sys.argv[3])
    else:
        main()
