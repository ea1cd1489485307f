"""The engine behind HTTP: OpenAI's and SGLang's interfaces. It knows nothing of arrays or devices."""
