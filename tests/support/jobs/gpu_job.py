"""Ranks that share one CUDA device, over gloo: `gpu_job.py FORM FAULT AT`.

Forms: fp32, bf16, fp16 (with a loss scaler), compile, manual (an all-reduce by hand), fsdp2, and
over NCCL, which takes one rank a device: nccl (under DDP), nccl-fsdp2.
Faults, all of the last rank from step AT on but the last: none, weights (written to, once), batches
(of random tokens), gradients (not averaged), computes, fetches (it is slow there), reduces.
"""

import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rankscope import agent
from tests.support.language_model import LanguageModel, counting, loss_of

FORM, FAULT, AT = sys.argv[1], sys.argv[2], int(sys.argv[3])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda")
TOKENS, LENGTH, BATCH, STEPS = 64, 33, 8, 80
SLOW_CYCLES, SLOW = 120_000_000, 0.06  # 60 ms and more
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "compile": torch.bfloat16}


def wrapped(inner):
    if FORM.endswith("fsdp2"):
        from tests.support.fully_sharded import fully_shard

        for block in inner.blocks:
            fully_shard(block)
        return fully_shard(inner)
    if FORM == "manual":
        return inner
    model = DistributedDataParallel(inner, device_ids=[0])
    return torch.compile(model) if FORM == "compile" else model


def slow_reduction(now):
    def hook(state, bucket):
        def then(future):
            if now():
                torch.cuda._sleep(SLOW_CYCLES)
            return future.value()[0] / RANKS

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(then)

    return hook


def main():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl" if FORM.startswith("nccl") else "gloo")
    torch.manual_seed(0)
    inner = LanguageModel(tokens=TOKENS, length=LENGTH).to(DEVICE)
    model = wrapped(inner)
    step = 0
    if FAULT == "reduces":
        model.register_comm_hook(None, slow_reduction(lambda: step >= AT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=FORM == "fp16")
    generator = torch.Generator(DEVICE).manual_seed(1 + RANK)
    with agent.attach(model, optimizer):
        for step in range(STEPS):
            wrong = step >= AT and RANK == RANKS - 1
            if wrong and FAULT == "fetches":
                time.sleep(SLOW)
            tokens = counting(BATCH, LENGTH, TOKENS, generator)
            if wrong and FAULT == "batches":
                tokens = torch.randint(0, TOKENS, (BATCH, LENGTH), device=DEVICE)
            optimizer.zero_grad()
            with torch.autocast("cuda", TYPES.get(FORM), enabled=FORM in TYPES):
                loss = loss_of(model, tokens)
            if wrong and FAULT == "computes":
                torch.cuda._sleep(SLOW_CYCLES)
            scaler.scale(loss).backward()
            if FORM == "manual":
                for parameter in inner.parameters():
                    if not (FAULT == "gradients" and step >= AT):
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= RANKS
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if FAULT == "weights" and RANK == RANKS - 1 and step == AT:
                with torch.no_grad():
                    inner.blocks[1].inner.weight[3, 5] += 0.5
    if FAULT == "none" and "fsdp2" not in FORM:
        held = hashlib.sha256(b"".join(p.detach().cpu().numpy() for p in inner.parameters()))
        every = [None] * RANKS
        dist.all_gather_object(every, held.hexdigest())
        assert len(set(every)) == 1, "the ranks themselves differ"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
