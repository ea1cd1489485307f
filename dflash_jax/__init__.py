"""DFlash speculative decoding in JAX."""
