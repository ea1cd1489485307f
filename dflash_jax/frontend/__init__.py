"""The library: `LLM`, its configuration, sequences with their text, tokenizers."""
