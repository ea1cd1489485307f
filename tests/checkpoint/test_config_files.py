"""Hostile TOML files: each is one line that names the file. Overrides of a config.json."""

import json

import pytest

from dflash_jax.checkpoint.config_files import MAX_TOML_BYTES, read_raw
from dflash_jax.errors import InputError
from dflash_jax.options.systems import read_system
from dflash_jax.options.train import read_toml


@pytest.mark.parametrize("read", [read_system, read_toml])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a = " + b"[" * 20000 + b"]" * 20000, "nested too deeply"),
        (b"#" * (MAX_TOML_BYTES + 1), f"more than {MAX_TOML_BYTES} bytes"),
        (bytes(range(256)), "is not TOML"),
    ],
    ids=["nested", "large", "binary"],
)
def test_a_hostile_config_is_an_input_error(read, content, said, tmp_path):
    path = tmp_path / "hostile.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said) as error:
        read(str(path))
    assert str(path) in str(error.value)


def test_a_config_without_an_end_is_an_input_error():
    with pytest.raises(InputError, match="/dev/zero has more than"):
        read_system("/dev/zero")


def test_overrides_are_merged_into_objects(tmp_path):
    raw = {"text_config": {"rope": {"theta": 1.0, "type": "default"}, "layers": [1, 2]}, "scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    overrides = {"text_config": {"rope": {"type": "yarn"}, "layers": [3]}, "scaling": {"factor": 4.0}, "new": 1}
    merged = {"text_config": {"rope": {"theta": 1.0, "type": "yarn"}, "layers": [3]}, "scaling": {"factor": 4.0}}
    assert read_raw(tmp_path, overrides) == merged | {"new": 1}
    assert read_raw(tmp_path) == raw
    with pytest.raises(InputError, match="text_config is 3: it must be an object"):
        read_raw(tmp_path, {"text_config": 3})
