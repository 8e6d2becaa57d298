"""The executor for NVIDIA GPUs: streams, events as fences, Triton kernels, flash-attn where it is installed, CUDA graphs."""
