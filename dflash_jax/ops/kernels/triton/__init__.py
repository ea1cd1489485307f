"""Kernels in Triton, for NVIDIA GPUs."""
