"""The options of commands and of `LLM`, as data, and the parsers that are made of them. Nothing here loads JAX."""
