"""Kernels on cards of all kinds: which are supported, tiles that fit them, and the PTX that their assembler reads."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from dflash_jax.ops import attention, backend
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.cache import Bounds, DeltaRecord, DeltaState, KVCache
from dflash_jax.ops.card import HOPPER, KIB, SHARED_MEMORY, Card
from dflash_jax.ops.kernels.triton import attention as triton_attention
from dflash_jax.ops.kernels.triton import delta, delta_chunks, launch, ptx
from dflash_jax.ops.kernels.triton import linear as triton_project
from dflash_jax.ops.kernels.triton import tiles as triton_tiles
from dflash_jax.ops.weights import quantize
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
    monkeypatch.setattr(ptx, "TOOLKIT", str(tmp_path / "none"))
    ptx.ptx_version.cache_clear()
    try:
        assert ptx.ptx_version(Card.of_capability(100).least_ptx) == expected
    finally:
        ptx.ptx_version.cache_clear()


def test_an_assembler_that_says_nothing_is_passed_over(tmp_path):
    path = assembler(tmp_path / "x", "13.0")
    assert ptx.release_of(path) == "13.0"
    path.write_text("#!/bin/sh\nexit 1\n")
    assert ptx.release_of(path) is None
    assert ptx.release_of(tmp_path / "missing") is None


@pytest.fixture
def installed(monkeypatch):
    """Sets the versions that are installed, and jax's."""

    def install(jax_version=(0, 11, 2), **versions: str):
        def find_spec(name):
            return versions.get(name)

        def version(name):
            return versions[name.replace("-", "_")]

        for module in (backend, launch):
            monkeypatch.setattr(module, "find_spec", find_spec)
            monkeypatch.setattr(module, "version", version)
        monkeypatch.setattr(jax, "__version_info__", jax_version)
        monkeypatch.setattr(jax, "__version__", ".".join(map(str, jax_version)))
        launch.why_not_jax_triton.cache_clear()

    yield install
    launch.why_not_jax_triton.cache_clear()


def reason_of(found, kernels: str = "auto") -> str | None:
    return Backend.of_device(found, kernels).no_triton


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "12.1"])
def test_card_of_supported_capability_has_triton(installed, capability):
    installed(jax_triton="0.4.1", triton="3.9.0")
    assert reason_of(device(capability)) is None


@pytest.mark.parametrize(
    ("found", "versions", "reason"),
    [
        (device("7.5"), {"triton": "3.9.0"}, "NVIDIA Some Card has compute capability 7.5: kernels need 8.0"),
        (device("9.0"), {}, "triton is not installed"),
        (device("9.0"), {"triton": "3.6.0", "jax_triton": "0.4.1"}, "Triton 3.6.0 is too old: 3.7 or later is needed"),
        (device("9.0"), {"triton": "3.9.0"}, "jax-triton is not installed"),
        (SimpleNamespace(platform="cpu", device_kind="cpu"), {"triton": "3.9.0"}, "cpu is not an NVIDIA GPU"),
    ],
)
def test_why_a_card_has_none(installed, found, versions, reason):
    installed(**versions)
    assert reason in reason_of(found)


@pytest.mark.parametrize(
    ("of_jax", "versions", "works"),
    [
        ((0, 11, 2), {"jax_triton": "0.4.1"}, True),
        ((0, 12, 0), {"jax_triton": "0.4.1"}, False),
        ((0, 12, 0), {"jax_triton": "0.5.0"}, True),
        ((0, 12, 0), {}, False),
    ],
)
def test_without_a_jax_triton_that_jax_can_trace_the_users_all_needs_a_compiler(
    installed, of_jax, versions, works, monkeypatch
):
    installed(of_jax, triton="3.10.0", **versions)
    reason = reason_of(device("9.0"))
    assert reason is None if works else "--kernels all" in reason
    for why_not in (None, "no C++ compiler"):
        monkeypatch.setattr(backend.call, "why_not", lambda why_not=why_not: why_not)
        chosen = Backend.of_device(device("9.0"), "all")
        assert chosen.no_triton is None if works or why_not is None else why_not in chosen.no_triton
        assert chosen.joins_launches == (why_not is None)
        assert not Backend.of_device(device("9.0")).joins_launches


def test_a_triton_under_another_name_has_its_own_version(installed, monkeypatch):
    """Of a PyTorch nightly."""
    installed(jax_triton="0.4.1", triton="3.9.0")

    def version(name):
        raise backend.PackageNotFoundError(name)

    monkeypatch.setattr(backend, "version", version)
    monkeypatch.setattr(backend, "import_module", lambda name: SimpleNamespace(__version__="3.6.0"))
    assert "Triton 3.6.0 is too old" in reason_of(device("9.0"))


def test_numbers_of_a_card():
    """JAX's numbers where it reports them, else those of the capability; for an unknown one, the least of all."""
    assert Card.of_device(device("9.0")) == Card(90, 227 * KIB, 132)
    assert Card.of_device(device("9.0", shared_memory_per_block_optin=1000, core_count=114)) == Card(90, 1000, 114)
    assert Card.of_capability(133) == Card(133, 99 * KIB, 132)
    assert Card.of_capability(100).multiprocessors == 148


def test_an_h200_has_what_was_measured_on_it():
    """Numbers that are in proportion to multiprocessors are as they stand."""
    assert all(HOPPER.scaled(n) == n for n in range(1000))
    assert [Card.of_capability(c).scaled(264) for c in (80, 89, 100, 120)] == [216, 284, 296, 340]


def launched(call, *args, **options) -> list:
    """The launches of a call, which returns zeros."""
    launches = []

    def stub(one):
        launches.append(one)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in (*(one.args[i] for i in one.in_place), *one.out))

    with launch.launching(stub):
        jax.eval_shape(partial(call, **options), *args)
    return launches


# By outputs, of a weight in bfloat16 and of one in FP8: outputs of a program, and steps in flight.
TILES = {
    90: {1056: ((16, 6), (16, 8)), 2048: ((16, 6), (32, 8)), 4096: ((32, 4), (64, 6)), 12352: ((64, 4), (64, 6))},
    # More in flight where programs have a multiprocessor each.
    100: {1056: ((16, 7), (16, 9)), 2048: ((16, 7), (32, 9)), 4096: ((32, 4), (64, 7)), 12352: ((64, 4), (64, 6))},
    # Fewer programs keep all multiprocessors busy.
    80: {1056: ((16, 6), (16, 8)), 1696: ((16, 6), (32, 8)), 3392: ((32, 4), (64, 6)), 12352: ((64, 4), (64, 6))},
}


@pytest.mark.parametrize("capability", TILES)
def test_tiles_of_linear_by_multiprocessors(capability):
    card, x = Card.of_capability(capability), jax.ShapeDtypeStruct((16, 2048), jnp.bfloat16)
    for outputs, tiles in TILES[capability].items():
        weight = jax.ShapeDtypeStruct((outputs, 2048), jnp.bfloat16)
        scaled = jax.eval_shape(lambda w: quantize(w, "int8", 16), weight)
        found = [launched(triton_project.project_triton, x, [w], card=card)[0] for w in (weight, scaled)]
        assert tuple((one.meta["BN"], one.num_stages) for one in found) == tiles


def test_parts_of_attention_by_multiprocessors(monkeypatch):
    """As many as two programs a multiprocessor are, at most 32."""
    # Interpreted kernels have fewer.
    monkeypatch.setattr(triton_attention, "PROGRAMS", 264)
    q, k = (jax.ShapeDtypeStruct((4, 16, n, 256), jnp.bfloat16) for n in (16, 2))
    cache = jax.eval_shape(partial(KVCache.create, 4, 2, 256, 2048, jnp.bfloat16))
    length, bounds = jax.ShapeDtypeStruct((4,), jnp.int32), jax.eval_shape(partial(Bounds.none, 4, 16))

    def splits(capability):
        call = partial(triton_attention.attend_triton, Card.of_capability(capability))
        return launched(call, q, k, k, None, cache, length, bounds)[0].meta["SPLITS"]

    assert [splits(c) for c in (80, 89, 90, 100, 120)] == [13, 17, 16, 18, 21]


def test_programs_of_the_delta_rule_by_multiprocessors():
    """Warps of a head's program, and its values over many chunks: few programs get more."""

    def state(rows, heads):
        return DeltaState(jnp.zeros((rows, heads, 2, 128, 128)), jnp.zeros((rows, 3, heads, 512)))

    def warps(capability, rows):
        record = DeltaRecord(*(jnp.zeros((rows, 5, 16, *x)) for x in ((128,), (2, 128), (2,), (512,))))
        call = partial(delta.replay_triton, Card.of_capability(capability))
        return launched(call, state(rows, 16), record, jnp.zeros(rows, jnp.int32))[0].num_warps

    def values(capability, heads):
        parts = [jnp.zeros((3, 1, heads, 2, 64, 128))] * 3 + [jnp.zeros((3, 1, heads, 2, 64, 64))]
        call = partial(delta_chunks.from_chunk_to_chunk, Card.of_capability(capability), tokens=192)
        rest = jnp.zeros((3, 1, heads, 2, 64, 128)), jnp.zeros((3, 1, heads, 2))
        return launched(call, state(1, heads), *parts, *rest)[0].meta["BV"]

    assert [warps(c, rows) for c, rows in ((90, 8), (90, 9), (100, 9), (100, 10), (80, 7))] == [8, 4, 8, 4, 4]
    cards = (90, 16), (90, 17), (100, 18), (100, 19), (80, 16)
    assert [values(c, heads) for c, heads in cards] == [32, 64, 32, 64, 32]


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


# Tokens of a round, KV heads, query heads on each and their size: Qwen3.6-35B-A3B, its drafter, and
# Qwen3.6-27B.
LONG_PROGRAMS = triton_attention.LONG_PROGRAMS
BLOCKS = [(t, *heads) for t in (1, 4, 8, 16) for heads in ((2, 8, 256), (8, 4, 128), (4, 6, 256))]


@pytest.mark.parametrize("capability", [90, 100, 103])
@pytest.mark.parametrize(("tokens", "heads", "group", "dim"), BLOCKS)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("cached", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_long_context_is_read_once_by_the_programs_that_run_at_once(
    capability, tokens, heads, group, dim, batch, cached, monkeypatch
):
    """Grid of attention with kernels "all": one tile of query rows, a wave of programs or less, three quarters of the
    card or more, and shared memory that holds the steps in flight."""
    # Without the interpreter's small grids.
    monkeypatch.setattr(triton_attention, "LONG_PROGRAMS", LONG_PROGRAMS)
    launches = []

    def record(made):
        launches.append(made)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in made.out)

    card = Card.of_capability(capability)
    cache = KVCache.create(batch, heads, dim, 4096, cached)
    q, k = jnp.zeros((batch, tokens, heads * group, dim), jnp.bfloat16), jnp.zeros((batch, tokens, heads, dim), cached)
    with launch.launching(record):
        for kernels in ("all", "auto"):
            run = partial(attention.attention, Backend.for_card(card, kernels))
            jax.eval_shape(run, q, k, k, None, cache, jnp.zeros(batch, jnp.int32))
    attends, joins = ([each for each in launches if each.kernel.fn.__name__ == name] for name in ("_attend", "_join"))
    (long, usual), (join, _) = attends, joins
    assert (long.meta["LEAST"] > 0) > (usual.meta["LEAST"] > 0)
    pairs, parts, tiles = long.grid
    assert tiles == 1 <= usual.grid[2]
    programs = card.multiprocessors
    assert 3 * programs <= 4 * pairs * parts <= 4 * programs
    rows, positions = long.meta["BM"], long.meta["BS"]
    assert rows >= tokens * group
    buffers = triton_attention.LONG_BUFFERS
    assert (rows + 2 * buffers * positions) * dim * q.dtype.itemsize < card.shared_memory
    assert long.meta["PAGE"] % positions == 0 == positions % 16
    # All columns are joined, in programs whose parts fit in their registers.
    assert join.meta["COLUMNS"] * join.grid[1] == dim if len(join.grid) > 1 else join.meta["COLUMNS"] == dim
    assert join.meta["SP"] * join.meta["COLUMNS"] <= 8192


def test_attention_for_long_contexts_is_for_cards_and_blocks_that_have_room(monkeypatch):
    monkeypatch.setattr(triton_attention, "LONG_PROGRAMS", LONG_PROGRAMS)

    def why(capability, tokens, dtype=jnp.bfloat16):
        q, k = jnp.zeros((1, tokens, 16, 256), dtype), jnp.zeros((1, tokens, 2, 256), dtype)
        return triton_attention.why_not_long(Card.of_capability(capability), q, k)

    assert why(90, 16) is why(100, 1) is None
    assert "Hopper" in why(120, 1)
    assert "136 query rows of a KV head: one program has 128 at most" in why(90, 17)
    assert "one program has 64" in why(90, 16, jnp.float32)


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
    assert triton_project.why_not_sums(5, 512, [weight], 64, HOPPER) is None
    assert triton_project.why_not_sums(5, 512, [per_run], 0, HOPPER) is None
    for rows, weights, head, named in (
        (1, [weight], 0, "each row"),
        (5, [source.normal(20, 512)], 0, "each row"),
        (5, [weight, weight], 0, "2 weights"),
        (5, [source.normal(8192, 512)], 0, "8192 outputs"),
        (5, [weight], 256, "512 inputs"),
        (5, [per_row], 0, "512 inputs"),
        (5, [factored], 0, "512 inputs"),
    ):
        assert named in (triton_project.why_not_sums(rows, 512, weights, head, HOPPER) or ""), (rows, head, named)
