"""Triton kernels. Importing a module here imports triton; `TRITON_INTERPRET=1` before that runs them on a CPU."""
