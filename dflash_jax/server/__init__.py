"""The engine behind HTTP: interfaces of OpenAI, Anthropic, vLLM and SGLang. It uses no arrays and no devices."""
