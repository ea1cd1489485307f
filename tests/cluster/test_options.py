import pytest

from dflash_jax.cluster.app import gpus_of
from dflash_jax.cluster.hosts import LEAST_CPUS, bundle
from dflash_jax.cluster.options import parse
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


@pytest.mark.parametrize(("option", "right"), [("--target-ongoing", "above 0"), ("--scale-up-s", "0 to 1000000000")])
def test_numbers_below_their_least_are_named(option, right):
    with pytest.raises(InputError, match=rf"{option} -1.0: it must be {right}"):
        parse([f"{option}=-1"])


def test_options_of_serve_are_known_and_unknown_ones_refused():
    args, _ = parse(["--served-model-name", "m", "--api-key", "k", "--replica-resources", '{"TPU": 4}'])
    assert (args.served_model_name, args.api_keys, args.replica_resources) == (["m"], ["k"], {"TPU": 4})
    with pytest.raises(InputError, match="unrecognized arguments"):
        parse(["--replica", "1"])


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--distributed"], "--distributed is of `dflash serve`: here --replica-hosts N"),
        (["--replica-hosts", "0"], "--replica-hosts 0: it must be 1 to 1024"),
        (["--replica-hosts", "2"], "--replica-hosts 2: it must divide the 1 devices of --mesh"),
        (["--replica-hosts", "3", "--mesh", "data=2,tensor=4"], "--replica-hosts 3: it must divide the 8 devices"),
        (["--replica-slice", "4x4"], "'4x4': it must be VERSION:TOPOLOGY, such as v6e:4x4"),
        (["--replica-slice", "v6e:4x"], "'v6e:4x': it must be VERSION:TOPOLOGY"),
        (
            ["--replica-slice", "v6e:4x4", "--replica-hosts", "2", "--mesh", "tensor=16"],
            "--replica-hosts: what a replica reserves follows from its --replica-slice",
        ),
        (["--replica-hosts", "2", "--mesh", "tensor=4", "--replica-gpus", "3"], "--replica-gpus 3: --replica-hosts 2"),
    ],
)
def test_what_no_replica_can_be_divided_over_is_refused(argv, named):
    with pytest.raises(InputError, match=named):
        parse(argv)


def test_each_host_of_a_replica_reserves_its_part():
    args, _ = parse(["--replica-hosts", "2", "--mesh", "tensor=16", "--replica-cpus", "4"])
    args.replica_gpus = 16
    assert bundle(args, gpus_of(args) / args.replica_hosts) == {"CPU": 4, "GPU": 8}
    args, _ = parse(["--replica-slice", "v6e:4x4", "--mesh", "tensor=16"])
    assert args.replica_slice == ("v6e", "4x4")
    # A bundle of a placement group is never empty.
    assert bundle(args, 0) == {"CPU": LEAST_CPUS}
