"""Attention over KV pages on a GPU: one contract (`contract.py`), one file for each way to compute it, and the choice."""
