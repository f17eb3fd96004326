"""The family of ranks that no longer hold the same: one detector, since one link breaks first.

Buffers have one of their own: where they are not kept equal at all, which is usual, that must not
hide what happens to the parameters.
"""
