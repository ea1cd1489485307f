import pytest

from dflash_jax.cli.cluster import parse
from dflash_jax.errors import InputError


@pytest.mark.parametrize(("given", "least", "most"), [("3", 3, 3), ("1:8", 1, 8), ("2:2", 2, 2)])
def test_replicas_are_a_number_or_a_range(given, least, most):
    args, _ = parse(["--replicas", given, "--slots", "4", "--port", "0"])
    assert args.replicas == (least, most)
    assert args.target_ongoing == 4.0
    assert args.slots == 4


@pytest.mark.parametrize("given", ["0", "8:1", "1:", "a", "1:2:3", "-1"])
def test_wrong_replicas_are_named(given):
    with pytest.raises(InputError, match="--replicas"):
        parse([f"--replicas={given}"])


@pytest.mark.parametrize(("option", "right"), [("--target-ongoing", "above 0"), ("--scale-up-s", "0 or more")])
def test_numbers_below_their_least_are_named(option, right):
    with pytest.raises(InputError, match=rf"{option} -1.0: it must be {right}"):
        parse([f"{option}=-1"])


def test_options_of_serve_are_known_and_unknown_ones_refused():
    args, _ = parse(["--served-model-name", "m", "--api-key", "k", "--replica-resources", '{"TPU": 4}'])
    assert (args.served_model_name, args.api_keys, args.replica_resources) == (["m"], ["k"], {"TPU": 4})
    with pytest.raises(InputError, match="unrecognized arguments"):
        parse(["--replica", "1"])


def test_a_replica_is_one_process():
    with pytest.raises(InputError, match="--distributed is of `dflash serve`"):
        parse(["--distributed"])
