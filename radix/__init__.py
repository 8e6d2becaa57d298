"""Bookkeeping of KV memory: the blocks, the prefix tree, who holds what. No torch, no I/O."""
