"""What the process has imported from which those of `forked_job` are forked.

A rank then begins within milliseconds. Of the agent, importing reads no setting and starts nothing;
its names are asked for, as a script does it: the module `attach` must not stand for its function.
"""

import encodings.idna

import sklearn.datasets
import torch._dynamo
import torch.distributed.device_mesh
import torch.nn.parallel

from rankscope.agent import attach, start

__all__ = ["attach", "encodings", "sklearn", "start", "torch"]
