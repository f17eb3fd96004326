"""What the agent costs a step: the same training with and without it, in turns, in one launch.

    python -m benchmarks.agent [--quick] [--json FILE] [--traincheck] [--server sink|real]

Two gloo ranks train under DistributedDataParallel on the CPU, one thread each. Times are those of
rank 0, as ratios; absolute times belong to the machine.

One trainer has three arms: plain, with the agent (default settings, posting over HTTP), and with
TensorBoard's `SummaryWriter.add_scalar` of the same scalars at every step. Steps with and without
the agent come in pairs, the order of each drawn by chance, and the first line of a workload is the
median of the ratios of the two: where a step of gloo ranks on busy cores takes now 0.7 and now 2
times the median, its interval is a quarter to a half of that of the ratio of the medians. At the
plain steps what the agent has hooked is taken out of torch and of the model, or the plain arm would
pay for it. What is taken out and put back is slower for some steps: so that is done before the
steps of both, and where steps are short one passes unmeasured after it. TensorBoard, which goes on
working after its steps, has blocks of its own beside plain ones. The agent is at its steady pace by
then. Its threads and the process that posts for it work in between, whatever step runs: steps hit
by them are known by their processor time and count for the agent.

`--reattached ROUNDS` adds a variant for the MLPs in which the agent is attached and closed around
each of its blocks, on one and the same trainer, with blocks of 1.2 s; what attaching and the dense
start cost is not in it. It needs no such correction, but a busy machine changes its pace within
such blocks: a second opinion for a quiet one, with five rounds and more.

After the rounds the agent is left in force for a while, as it is for a user (`the agent alone`).
There the steps during which its threads or its uploader ran are compared with all others, and the
steps of each kind of sample with those not sampled: the sharpest measure of the steps that it makes
slow, where two arms differ by chance. Beside it stands in how many steps they worked for more than
a fifth of a step on all ranks together, by their processor time, which no noise is in: in no other
step can they have taken as much from the training.

Times of steps are noisy where ranks wait for each other on busy cores; what the training thread
itself does is less so. The last line of a workload says by how many microseconds of processor time
each part of a step differs between the two of a pair, where the agent does not sample. Its work is
in `loss` and `backward` (both ask whether it wants to know) and in `optimizer` (its hook counts the
step); what it did to the caches of the training would show in the others.

`slow/1000` is the number of steps in a thousand that take more than 1.2 times the plain median,
with the agent less without it. Processor time is that of rank 0's process and of the one that posts
for it: what other processes take is not in it. With RANKSCOPE_MODE=disabled in the environment both
arms are plain, and every ratio should be 1: the benchmark's test of itself, and a measure of what
it can resolve on a machine. Intervals are 95 % bootstrap intervals over rounds.

What is posted to takes time from the same cores without being a cost of the agent: so by default
it is a minimal HTTP sink at nice 19; `--server real` posts to `rankscope serve` instead.

`--traincheck` adds TrainCheck (package `traincheck`) in its selective mode, installed into a
temporary environment with the same torch: two to three minutes more. It changes torch for good, so
it runs in a process of its own, one rank without DDP, in turns with a plain process.

The full run takes thirteen minutes on a quiet machine; `--quick` takes two, its intervals are wide,
and the agent has not yet come to its steady pace: for an impression, not for a judgement.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

# Run as a script, the folder beside this file is the package `agent`.
from agent.blocks import Plan, run

_QUICK = ("MLP, 1 ms", "MLP, 10 ms")
_FIGURES = ("median", "mean", "p99", "p99.9", "slow_per_1000")
# What a rank's threads may use; gloo and the agent are not counted by OpenMP.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two minutes: two workloads")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the time measured")
    parser.add_argument("--only", action="append", default=[], help="a workload's name; repeatable")
    parser.add_argument("--server", choices=("sink", "real"), default="sink")
    parser.add_argument("--reattached", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--traincheck", action="store_true", help="beside it; 2 to 3 minutes more")
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well")
    options = parser.parse_args()
    if 0 < options.reattached < 5:
        parser.error("--reattached: fewer than 5 rounds give no interval")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with served(options.server, folder) as (url, report):
            plan = Plan(
                server=url,
                folder=folder,
                scale=options.scale * (0.25 if options.quick else 1.0),
                reattached=options.reattached,
                workloads=tuple(options.only or (_QUICK if options.quick else ())),
                calls=200 if options.quick else 400,
            )
            results = json.loads(launch(options.ranks, plan))
            results["posted"] = report(list(results["workloads"].values()))
        if options.traincheck:
            from agent import traincheck

            results["traincheck"] = traincheck.measure(Path(folder))
    results["seconds"] = time.perf_counter() - began
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    show(results)


# --------------------------------------------------------------------------------------- processes


@contextmanager
def served(kind: str, folder: str) -> Iterator[tuple[str, Any]]:
    """A server, and a function that returns what it was posted for the workloads."""
    if kind == "sink":
        command = [sys.executable, str(Path(__file__).parent / "sink.py")]
    else:
        serve = str(Path(sys.executable).with_name("rankscope"))
        command = [serve, "serve", "--port", "0", "--db", f"sqlite:///{folder}/bench.db"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split()[-1]

            def report(workloads: list[dict[str, Any]]) -> dict[str, Any]:
                if kind == "real":
                    return {r: {"own": own_series(url, r)} for w in workloads for r in w["runs"]}
                assert server.stdin is not None
                assert server.stdout is not None
                server.stdin.write("report\n")
                server.stdin.flush()
                posted: dict[str, Any] = json.loads(server.stdout.readline())
                return posted

            yield url, report
        finally:
            server.terminate()
            server.wait(20)


def own_series(url: str, run_id: str) -> dict[str, float]:
    """Last values of what the agent says of itself."""
    base = f"{url}/api/v1/runs/{quote(run_id)}"
    with urllib.request.urlopen(f"{base}/metrics") as answer:
        names = [item["name"] for item in json.load(answer)["items"]]
    own = {}
    for name in names:
        if name.startswith("rankscope/"):
            with urllib.request.urlopen(f"{base}/series?metric={quote(name)}&rank=0") as answer:
                own[name] = float(json.load(answer)["series"][0]["values"][-1])
    return own


def launch(ranks: int, plan: Plan) -> str:
    """Runs the ranks; what rank 0 printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | _ENVIRONMENT | {"MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common["RANKSCOPE_SPOOL"] = plan.folder
    common["BENCHMARK_PLAN"] = json.dumps(asdict(plan))
    running = []
    try:
        for rank in range(ranks):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, __file__, "--rank"]
            pipe = subprocess.PIPE
            running.append(subprocess.Popen(command, env=environment, stdout=pipe, text=True))
        longest = 1800 * max(1.0, plan.scale)
        outputs = [process.communicate(timeout=longest)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise SystemExit("a rank failed")
    return outputs[0]


# ------------------------------------------------------------------------------------------ output


def show(results: dict[str, Any]) -> None:
    """Prints the tables."""
    head = f"{'':44}{'steps':>7} " + "".join(f"{name:>25}" for name in _FIGURES)
    print(f"\nRatios to the same training without (95 % interval)\n{head}")
    for name, figures in results["workloads"].items():
        plain = figures["plain_ms"]
        print(
            f"{name}: {figures['tensors']} tensors, batch {figures['batch']}; plain step "
            f"{plain['median']:.3g} ms (p99 {plain['p99']:.3g} ms, {plain['steps']} steps)"
        )
        share, pairs = figures["paired"], figures["paired"]["pairs"]
        print(f"  {'agent, ratios of neighbouring steps':42}{pairs:>7} {interval(share, 4):>25}")
        for arm, title in (
            ("agent", "agent"),
            ("reattached", "agent, re-attached at each block"),
            ("tensorboard", "TensorBoard SummaryWriter, 6 scalars"),
        ):
            if arm in figures:
                print(row(title, figures[arm]))
        if figures["alone"] is not None:
            alone = figures["alone"]
            line = (
                f"in 1,000 steps {interval(alone['slow'], 2)} slow by its threads and uploader "
                f"(they ran in {alone['hit']['value']:.1f}, which are "
                f"{interval(alone['hit_length'], 2)} times as long, and worked for more than a "
                f"fifth of a step in {interval(alone['overworked'], 2)}), "
                f"{interval(alone['over_limit'], 2)} by samples (with one of losses a step is "
                f"{interval(alone['sampled_length'], 2)} times as long)"
            )
            print(f"  {'the agent alone':42}{alone['steps']:>7} {line}")
        processor = dict(figures["processor"])
        samples, sample = processor.pop("samples"), processor.pop("sampled_step")
        line = f"{samples['value']:.1f} samples in 1,000 steps, {interval(sample, 0)} us each"
        print(f"  {'agent, processor time':50}{interval(processor.pop('ratio'), 4):>25} {line}")
        line = ", ".join(f"{part} {interval(extra, 1)}" for part, extra in processor.items())
        print(f"    us more on the training thread at other steps: {line}")
    for name, figures in results.get("traincheck", {}).items():
        if isinstance(figures, str):
            print(f"TrainCheck: {figures}")
        else:
            print(f"{name}, one process without DDP; plain step {figures['plain_ms']:.3g} ms")
            print(row("TrainCheck, selective (1 step in 10)", figures["traincheck"]))
    if "traincheck" not in results:
        print("TrainCheck: not measured; --traincheck does")
    show_own(results)
    if "calls" in results:
        print("\nLogging 20 scalars, microseconds: median (p99)")
        for name, figures in results["calls"].items():
            if isinstance(figures, str):
                print(f"  {name:20} {figures}")
                continue
            line = (f"{k} {v['median_us']:.1f} ({v['p99_us']:.1f})" for k, v in figures.items())
            print(f"  {name:20} " + ", ".join(line).replace("in_training", "in training"))
    print(f"\n{results['seconds']:.0f} s")


def row(title: str, figures: dict[str, Any]) -> str:
    """One line of the table."""
    cells = ""
    for name in _FIGURES:
        if figures[name] is None:
            cells += f"{'too few steps':>25}"
            continue
        digits = 4 if name == "median" else 3 if name == "mean" else 2
        cells += f"{interval(figures[name], digits):>25}"
    return f"  {title:42}{figures['steps']:>7} {cells}"


def interval(figure: dict[str, float] | None, digits: int) -> str:
    """A value with its interval."""
    if figure is None:
        return "unknown"
    value, low, high = (f"{figure[k]:.{digits}f}" for k in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def show_own(results: dict[str, Any]) -> None:
    """What the agent says of itself, and what was posted."""
    print("\nThe agent's own account (rank 0, its last report), and what works beside the training")
    for name, figures in results["workloads"].items():
        run_id = figures["runs"][0]
        posted = results["posted"].get(run_id, {})
        own = ", ".join(
            f"{k.removeprefix('rankscope/')} {v:.4g}" for k, v in posted.get("own", {}).items()
        )
        background = figures["background_us_per_step"]
        line = "unknown" if background is None else f"{background:.1f} us a step"
        print(f"  {name}: {own}; threads and uploader {line}")
        if "posts" in posted:
            print(
                f"  {'':4}{posted['posts']} posts, {posted['bytes']} bytes, "
                f"{posted['points']} points; dropped {posted['dropped']}"
            )
        for fault in posted.get("faults", []):
            print(f"  {'':4}FAULT {fault}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        given = json.loads(os.environ["BENCHMARK_PLAN"])
        run(Plan(**given | {"workloads": tuple(given["workloads"])}))
    else:
        main()
