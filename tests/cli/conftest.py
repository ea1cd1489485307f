"""Models that commands in one process have in common."""

import pytest

from dflash_jax import LLM


@pytest.fixture(scope="module")
def models() -> dict:
    """`LLM` objects by their options."""
    return {}


@pytest.fixture
def shared_models(models, monkeypatch):
    """Commands with the same options of models get one `LLM`: its programs are traced once, not for every command."""

    class Shared(LLM):
        def __new__(cls, target=None, draft="auto", **options):
            llm = cls.unloaded(target=target, draft=draft, **options)
            llm.load()
            return llm

        @classmethod
        def unloaded(cls, **options):
            key = repr(sorted(options.items()))
            if key not in models:
                models[key] = LLM.unloaded(**options)
            return models[key]

    monkeypatch.setattr("dflash_jax.frontend.llm.LLM", Shared)
