"""FSDP2 and its tensors, where the installed torch has them."""

try:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed._tensor import Shard

__all__ = ["Shard", "fully_shard"]
