"""Kernels on cards of all kinds: which are supported, tiles that fit them, and the PTX that their assembler reads."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from dflash_jax.ops import backend
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.card import KIB, SHARED_MEMORY, Card
from dflash_jax.ops.kernels.triton import attention as triton_attention
from dflash_jax.ops.kernels.triton import launch
from dflash_jax.ops.kernels.triton import linear as triton_project
from dflash_jax.ops.kernels.triton import tiles as triton_tiles
from tools.kernels import arguments
from tools.kernels.arguments import Source


def device(capability: str, **more) -> SimpleNamespace:
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    return SimpleNamespace(
        platform="gpu", client=client, compute_capability=capability, device_kind="NVIDIA Some Card", **more
    )


def assembler(directory, release: str):
    directory.mkdir(exist_ok=True)
    path = directory / "ptxas"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("on_path", "in_toolkit", "expected"),
    [
        *(("13.0", None, 90), ("13.9", None, 90), ("12.8", None, 87), ("13.0", "12.9", 88), (None, None, 90)),
        # Of no use for the card, so that XLA cannot take it either.
        *(("13.0", "11.8", 90), ("12.0", "12.8", 87)),
    ],
)
def test_ptx_is_of_a_version_that_each_assembler_reads(monkeypatch, tmp_path, on_path, in_toolkit, expected):
    """Triton's own is newer than XLA's on many machines, where its PTX would be refused."""
    for name, release in (("path", on_path), ("toolkit/bin", in_toolkit)):
        (tmp_path / name).mkdir(parents=True)
        if release:
            assembler(tmp_path / name, release)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    # Of this machine, which may have a toolkit of its own.
    monkeypatch.setattr(launch, "TOOLKIT", str(tmp_path / "none"))
    launch.ptx_version.cache_clear()
    try:
        assert launch.ptx_version(Card.of_capability(100).least_ptx) == expected
    finally:
        launch.ptx_version.cache_clear()


def test_an_assembler_that_says_nothing_is_passed_over(tmp_path):
    path = assembler(tmp_path / "x", "13.0")
    assert launch.release_of(path) == "13.0"
    path.write_text("#!/bin/sh\nexit 1\n")
    assert launch.release_of(path) is None
    assert launch.release_of(tmp_path / "missing") is None


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "12.1"])
def test_card_of_supported_capability_has_triton(monkeypatch, capability):
    monkeypatch.setattr(jax, "devices", lambda: [device(capability)])
    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    assert Backend.detect().has_triton


@pytest.mark.parametrize(
    ("found", "spec", "reason"),
    [
        (device("7.5"), object(), "NVIDIA Some Card has compute capability 7.5: kernels need 8.0"),
        (device("9.0"), None, "jax-triton is not installed"),
        (SimpleNamespace(platform="cpu", device_kind="cpu"), object(), "cpu is not an NVIDIA GPU"),
    ],
)
def test_why_a_card_has_none(monkeypatch, found, spec, reason):
    monkeypatch.setattr(jax, "devices", lambda: [found])
    monkeypatch.setattr(backend, "find_spec", lambda name: spec)
    assert reason in Backend.detect().no_triton


@pytest.mark.parametrize(
    ("of_jax", "of_jax_triton", "works"),
    [((0, 11, 2), "0.4.1", True), ((0, 12, 0), "0.4.1", False), ((0, 12, 0), "0.5.0", True)],
)
def test_a_jax_that_cannot_trace_jax_triton(monkeypatch, of_jax, of_jax_triton, works):
    monkeypatch.setattr(jax, "devices", lambda: [device("9.0")])
    monkeypatch.setattr(jax, "__version_info__", of_jax)
    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    monkeypatch.setattr(backend, "version", {"jax-triton": of_jax_triton, "triton": "3.10.0"}.get)
    reason = Backend.detect().no_triton
    assert reason is None if works else "needs jax below 0.12" in reason


@pytest.mark.parametrize("has_name", [True, False])
def test_a_triton_that_jax_triton_cannot_use(monkeypatch, has_name):
    """PyTorch 2.11 has Triton 3.6, a nightly one under another distribution's name."""

    def version(name):
        if name == "triton" and not has_name:
            raise backend.PackageNotFoundError(name)
        return {"jax-triton": "0.4.1", "triton": "3.6.0"}[name]

    monkeypatch.setattr(jax, "devices", lambda: [device("9.0")])
    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    monkeypatch.setattr(backend, "version", version)
    monkeypatch.setattr(backend, "import_module", lambda name: SimpleNamespace(__version__="3.6.0"))
    expected = "Triton 3.6.0 is too old for jax-triton 0.4.1: it needs 3.7 or later"
    assert Backend.detect().no_triton == expected


def test_numbers_of_a_card():
    """JAX's numbers where it reports them, else those of the capability; for an unknown one, the least of all."""
    assert Card.of_device(device("9.0")) == Card(90, 227 * KIB)
    assert Card.of_device(device("9.0", shared_memory_per_block_optin=1000)) == Card(90, 1000)
    assert Card.of_capability(133) == Card(133, 99 * KIB)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("bytes_of_row", [64, 256, 512, 1024])
def test_tiles_of_attention_fit(capability, bytes_of_row):
    """Queries, keys and values of a step take at most the card's shared memory, and products have 16 rows or more."""
    card = Card.of_capability(capability)
    for rows, positions in ((128, 64), (64, 128), (64, 64), (16, 128)):
        fewer, steps = triton_attention.tile_sizes(rows, positions, bytes_of_row, card)
        assert 16 <= fewer <= rows
        assert 16 <= steps <= positions
        buffers = triton_attention.STAGES - (not card.reads_shared)
        assert fewer * bytes_of_row + 2 * buffers * steps * bytes_of_row < card.shared_memory


def test_fewer_steps_in_flight_on_small_cards():
    def stages(capability):
        return triton_tiles.stages_within(4, 36 * KIB, Card.of_capability(capability))

    assert [stages(c) for c in (80, 89, 90, 120)] == [4, 3, 4, 3]


def test_float16_is_normed_before_products_of_several_rows():
    """x times the norm's weight may overflow before the division that comes last."""
    weights = [jnp.zeros((64, 64))]
    assert triton_project.fuses_norm(jnp.bfloat16, 4, 64, weights)
    assert not triton_project.fuses_norm(jnp.float16, 4, 64, weights)
    assert triton_project.fuses_norm(jnp.float16, 1, 64, weights)


def test_products_that_have_one_sum():
    """One row, several weights, enough outputs, and runs, factors and heads that are not whole in each part."""
    source = Source(0)
    weight, few_bits = source.normal(1040, 512), partial(arguments.in_few_bits, source, source.draw(1040, 512))
    per_run, per_row, factored = few_bits("fp8", 4), few_bits("int8", 1), few_bits("nvfp4", None)
    assert triton_project.why_not_sums(5, 512, [weight], 64) is None
    assert triton_project.why_not_sums(5, 512, [per_run], 0) is None
    for rows, weights, head, named in (
        (1, [weight], 0, "each row"),
        (5, [source.normal(20, 512)], 0, "each row"),
        (5, [weight, weight], 0, "2 weights"),
        (5, [source.normal(8192, 512)], 0, "8192 outputs"),
        (5, [weight], 256, "512 inputs"),
        (5, [per_row], 0, "512 inputs"),
        (5, [factored], 0, "512 inputs"),
    ):
        assert named in (triton_project.why_not_sums(rows, 512, weights, head) or ""), (rows, head, named)
