"""Models: parameters and pure forward passes; caches come from and go to the caller."""
