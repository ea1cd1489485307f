"""Arguments of kernels, and comparisons of kernels with their definitions."""
