"""Tiny random models of odd sizes, the forward passes that several test files share compiled, and scripts."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models.config import (
    AttentionSpec,
    DraftConfig,
    DraftLayerSpec,
    GatedDeltaSpec,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    MoeSpec,
    RopeSpec,
    VisionConfig,
)
from dflash_jax.models.decoder import Decoder, abstract_decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.mtp import Mtp
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.models.vision import VisionTower, abstract_tower
from dflash_jax.parallel.sharding import parameter_paths

VOCAB, HIDDEN = 101, 36

ATTENTION = AttentionSpec(
    num_heads=6, num_kv_heads=2, head_dim=20, rope=RopeSpec(10000.0, 12, sections=(3, 2, 1)), gated=True
)
DELTA = GatedDeltaSpec(num_key_heads=2, num_value_heads=6, key_dim=10, value_dim=7)
VISION = VisionConfig(
    depth=2,
    hidden_size=48,
    num_heads=4,
    intermediate_size=76,
    patch_size=4,
    temporal_patch_size=2,
    merge_size=2,
    in_channels=3,
    num_positions=36,
    out_hidden_size=HIDDEN,
)
MOE = MoeSpec(num_experts=7, experts_per_token=3, intermediate_size=11, shared_intermediate_size=13)


def tiny_config(pattern: str = "ddad", moe: bool = True, **changes) -> ModelConfig:
    """A target of one layer a letter: ``d`` Gated DeltaNet, ``a`` attention."""
    mixers = {"a": ATTENTION, "d": DELTA}
    ffn = MOE if moe else MlpSpec(29)
    config = ModelConfig(
        model_type="qwen3_5_moe_text" if moe else "qwen3_5_text",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        layers=tuple(LayerSpec(mixers[letter], ffn) for letter in pattern),
        norm_eps=1e-6,
        norm_offset=1.0,
        max_positions=2048,
    )
    return replace(config, **changes)


def tiny_draft_config(target: ModelConfig, windows=(6, None), **changes) -> DraftConfig:
    """A drafter for ``target`` with one layer a window (None: full attention); sliding layers are causal."""
    attention = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=10, rope=RopeSpec(10000.0, 10))
    depth = len(target.layers)
    config = DraftConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        layers=tuple(DraftLayerSpec(attention, 31, window, window is not None) for window in windows),
        block_size=16,
        mask_token_id=target.vocab_size - 2,
        target_layer_ids=tuple(sorted({0, depth // 2, depth - 1})),
        num_target_layers=depth,
        norm_eps=1e-6,
        max_positions=2048,
    )
    return replace(config, **changes)


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], fan_in: int, offset: float = 0.0) -> np.ndarray:
    """A float32 weight with enough spread that leaving out its part shows. ``name`` on disk or in a module."""
    noise = rng.standard_normal(shape)
    if name.endswith(("A_log", "a_log")):
        value = np.log(rng.uniform(0.05, 4.0, shape))
    elif name.endswith("dt_bias"):
        value = noise - 1.0
    elif "conv" in name:
        value = 0.6 * noise
    elif "norm" in name:
        # The norm inside Gated DeltaNet is stored as w in every family.
        inner = name.endswith(("linear_attn.norm.weight", "mixer.norm"))
        value = (1.0 if inner else 1.0 - offset) + 0.3 * noise
    elif "embed" in name:
        value = noise
    else:
        into_stream = re.search(r"(o_proj|out_proj|down_proj|\.o|\.out|\.down)(\.weight)?$", name)
        router = re.search(r"(mlp\.gate\.weight|router)$", name)
        value = noise * (0.4 if into_stream else 1.6 if router else 1.0) * fan_in**-0.5
    return value.astype(np.float32)


def randomise(module, seed: int, offset: float = 0.0):
    """``module`` (abstract) with random arrays."""
    rng = np.random.default_rng(seed)
    leaves, structure = jax.tree.flatten(module)
    arrays = []
    for path, leaf in zip(parameter_paths(module), leaves, strict=True):
        # o and out are [H, heads, …], fc [H, taps, H]: their inputs are all but the first axis.
        last = path.rsplit(".", 1)[-1]
        fan_in = int(np.prod(leaf.shape[1:])) if last in ("o", "out", "fc") else leaf.shape[-1]
        arrays.append(jnp.asarray(draw(rng, path, leaf.shape, fan_in, offset), leaf.dtype))
    return jax.tree.unflatten(structure, arrays)


def random_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    return randomise(abstract_decoder(config), seed, config.norm_offset)


def random_drafter(config: DraftConfig, seed: int = 0) -> Drafter:
    return randomise(abstract_drafter(config), seed)


def random_head(target: ModelConfig, seed: int = 0) -> Mtp:
    return randomise(abstract_drafter(MtpConfig(target)), seed, target.norm_offset)


def random_tower(config: VisionConfig = VISION, seed: int = 0) -> VisionTower:
    return randomise(abstract_tower(config), seed)


def whole_pass(tower: VisionTower, patches, **frames) -> jax.Array:
    """The rows of `frame_arrays`: all blocks of a tower in one call."""
    x = jnp.zeros((len(patches), tower.config.hidden_size), tower.dtype)
    return _blocks(tower, x, np.int32(0), np.int32(tower.config.depth), patches, **frames)[1]


_blocks = jax.jit(VisionTower.__call__)


def in_a_thread(function: Callable[[], object]) -> None:
    """Calls a function that lowers its thread's priority, which no thread of a user can raise again."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(function).result()


def in_one_program(function: Callable) -> Callable:
    """``function``, compiled whole: operation by operation, hundreds of compilations take most of a test's time.

    Arguments that are numbers, texts or None are constants of the program.
    """
    programs: dict[tuple[int, ...], Callable] = {}

    def call(*args):
        constants = tuple(i for i, x in enumerate(args) if x is None or isinstance(x, (int, float, str)))
        return programs.setdefault(constants, jax.jit(function, static_argnums=constants))(*args)

    return call


def map_numbers(function: Callable[[jax.Array], jax.Array], tree):
    """``tree`` with ``function`` of each array of numbers; arrays of indices, such as tables, stay."""
    return jax.tree.map(lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def flags_of_devices(count: int) -> str:
    """XLA_FLAGS of a process with this many CPU devices, whose number is fixed when JAX starts."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"


def run_on_eight_devices(path: Path, chosen: str) -> None:
    """Runs the tests of a file that are marked ``chosen`` ("long", or "not long") on eight CPU devices."""
    command = [sys.executable, "-m", "pytest", "-x", "-m", chosen, str(path), f"--rootdir={Path(__file__).parents[1]}"]
    environment = {**os.environ, "XLA_FLAGS": flags_of_devices(8)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def without_kernels_line(stderr: str) -> str:
    """What a command said, but for the line that says that there is no C++ compiler."""
    return "".join(line for line in stderr.splitlines(keepends=True) if "XLA's" not in line)


def tokens_of(rng: np.random.Generator, *shape: int, vocab: int = VOCAB) -> jax.Array:
    return jnp.asarray(rng.integers(0, vocab, shape), jnp.int32)


extend = partial(jax.jit, static_argnames=("taps",))(Decoder.extend)
verify = partial(jax.jit, static_argnames=("taps",))(Decoder.verify)
commit = jax.jit(Decoder.commit)
logits = jax.jit(Decoder.logits)


def load_script(name: str) -> ModuleType:
    """A file of scripts/ as a module. Scripts import the package and tools/ only: no folder has to be on the path."""
    path = Path(__file__).parents[1] / "scripts" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said_by_two(code: str, *arguments: str) -> list[str]:
    """The stdout of each of two processes that run ``code`` together on the CPU."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=environment | {"JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    return [process.communicate()[0] for process in processes]
