"""The library: `LLM`, sequences with their text, tokenizers."""
