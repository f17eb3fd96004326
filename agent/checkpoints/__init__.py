"""Checkpoints on disk, compared tensor by tensor: `rankscope verify`.

Read are files of `torch.save` and safetensors, folders of such files, and folders of
torch.distributed.checkpoint, each without running code from them (`opening` says which is which).
What they hold becomes a `Source`: dotted names of tensors, read one at a time, and of plain values.
Equality is decided by the agent's digests; what differs is then compared element by element.
"""
