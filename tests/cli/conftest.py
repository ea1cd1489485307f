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

    def shared(*args, **options):
        key = repr((args, sorted(options.items())))
        if key not in models:
            models[key] = LLM(*args, **options)
        return models[key]

    monkeypatch.setattr("dflash_jax.frontend.llm.LLM", shared)
