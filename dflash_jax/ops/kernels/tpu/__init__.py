"""Kernels for TPUs, in Pallas (Mosaic)."""
