"""Runs a script in the workers of Ray Train.

in_ray.py RANKS SCRIPT ARGUMENT ...
"""

import os
import runpy
import sys
from pathlib import Path

# Half a minute is not enough where all cores are busy.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
os.environ.setdefault("RAY_gcs_rpc_server_connect_timeout_s", "300")

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def work(job):
    """One worker."""
    sys.argv[:] = job["arguments"]
    os.chdir(job["folder"])
    runpy.run_path(job["arguments"][0])["main"]()


def main():
    """0 where all ended well."""
    count, *arguments = sys.argv[1:]
    folder = str(Path.cwd())
    ray.init(num_cpus=int(count), include_dashboard=False, log_to_driver=True)
    TorchTrainer(
        work,
        train_loop_config={"arguments": arguments, "folder": folder},
        scaling_config=ScalingConfig(num_workers=int(count)),
        run_config=RunConfig(storage_path=folder),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()


if __name__ == "__main__":
    main()
