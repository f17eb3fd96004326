"""A plain training script that `traincheck-collect` can instrument: it trains blocks on demand.

Each line of stdin, `<batch> <steps>`, is a block; its step times in seconds go as a line of JSON to
the file that the variable TIMES names. It stands at the top level because TrainCheck searches there
for the model and for the training loop.
"""

import json
import os
import sys
import time

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 128),
    nn.ReLU(),
    nn.Linear(128, 128),
    nn.ReLU(),
    nn.Linear(128, 128),
    nn.ReLU(),
    nn.Linear(128, 128),
    nn.ReLU(),
    nn.Linear(128, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
criterion = nn.CrossEntropyLoss()
for line in sys.stdin:
    batch, count = (int(word) for word in line.split())
    x = torch.randn(batch, 64)
    y = torch.randint(0, 10, (batch,))
    times = []
    for _step in range(count):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    with open(os.environ["TIMES"], "a") as file:
        file.write(json.dumps(times) + "\n")
