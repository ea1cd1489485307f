"""Runs `weights.py` in a process of its own, apart from `test_mesh.py`: each takes minutes."""

from pathlib import Path

import pytest

from tests.helpers import run_on_eight_devices


@pytest.mark.parametrize("chosen", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_all_forms_of_weights_on_meshes_give_the_tokens_of_one_device(chosen):
    run_on_eight_devices(Path(__file__).with_name("weights.py"), chosen)
