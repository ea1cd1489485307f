"""What XLA makes of a system at full size, for accelerators that this machine need not have.

    python scripts/compile/report.py --config configs/qwen3.6-35b-a3b.toml --device b200 [--devices 8] [--slots 32]

Compiles prefill, the plain step and the DFlash round with abstract weights, and reports bytes per device, kernels and
collectives per layer, graph breaks in the loop and compile seconds. It needs Python 3.12 and jax 0.11 or later with the
compilers: jax-cuda13-plugin, jax-cuda13-pjrt and nvidia-cuda-nvcc for NVIDIA, libtpu for TPUs. Devices: h100, h200,
b200, or a TPU slice such as v6e:2x4.
"""

import argparse
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from dflash_jax.checkpoint.config_files import find_config
from dflash_jax.cli.options import Parser, exit_code
from dflash_jax.cli.system_config import read_system
from dflash_jax.errors import InputError
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.card import CHOICES, Card
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.planner import abstract_pair, read_shapes
from dflash_jax.tools.xla_text import KERNELS, copied_bytes, shape_key, thunk_kinds, weights_read, written_bytes

# Read when jax, the CUDA plugin or libtpu loads.
WITHOUT_DEVICES = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # JAX asks NVIDIA's libraries for their versions, which fails without a driver.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
SPECS = Path(__file__).parents[1] / "assets/gpu_specs"
# H200 is H100 with another memory.
H200 = {
    "memory_bandwidth: 3352320000000": "memory_bandwidth: 4800000000000",
    "device_memory_size: 84942979072": "device_memory_size: 151397597184",
    "NVIDIA H100 80GB HBM3": "NVIDIA H200 141GB HBM3e",
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


def prepare() -> None:
    """For compilers of devices that are not there: before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    for variable, value in WITHOUT_DEVICES.items():
        os.environ.setdefault(variable, value)


def topology(device: str, count: int) -> list:
    """Devices to compile for."""
    from jax.experimental import topologies

    if ":" in device:
        one = all(int(n) == 1 for n in device.partition(":")[2].split("x"))
        options = {"chips_per_host_bounds": (1, 1, 1)} if one else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=device, **options).devices
    text = (SPECS / f"{'h100' if device == 'h200' else device}.txtpb").read_text()
    if device == "h200":
        for old, new in H200.items():
            text = text.replace(old, new)
    return topologies.get_topology_desc(platform="cuda", target_config=text, topology=f"1x1x{count}").devices


def backend_of(device, kernels: str) -> Backend:
    """The backend of a device that is compiled for and need not be here."""
    if hasattr(device, "compute_capability"):
        card = Card.of_device(device)
        has_triton = kernels == "auto" and find_spec("jax_triton")
        return Backend.for_card(card) if has_triton else Backend.xla("cuda", card)
    return Backend.xla(device.platform)


def thunks(folder: Path) -> str:
    """The GPU's list of kernels, copies, collectives and graphs."""
    # The second is missing where no pass changed the first.
    for pattern in ("*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt"):
        if found := sorted(folder.glob(pattern), key=lambda p: p.stat().st_size):
            return found[-1].read_text()
    return ""


def local_shapes(tree) -> set[tuple[int, ...]]:
    """Keys of a device's parts of arrays from 64 KiB on."""
    import jax

    leaves = [x for x in jax.tree.leaves(tree) if x.size * x.dtype.itemsize >= 1 << 16]
    return {shape_key(x.sharding.shard_shape(x.shape)) for x in leaves}


def resident_bytes(tree) -> int:
    """Bytes of a device's parts of arrays from 64 KiB on."""
    import jax

    leaves = [x for x in jax.tree.leaves(tree) if x.size * x.dtype.itemsize >= 1 << 16]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def measure(lowered, layers: int, arrays: dict, options: dict) -> dict:
    """Compiles and counts. A loop's body counts once, so figures of a decode program are per round.

    ``arrays``: name → trees of arrays that should not be copied.
    """
    import jax

    folder = Path(tempfile.mkdtemp(prefix="xla_"))
    began = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options={"xla_dump_to": str(folder), **options})
        seconds, text = time.perf_counter() - began, thunks(folder)
    except jax.errors.JaxRuntimeError as e:  # a TPU's compiler refuses what its memory cannot hold
        return {"failed": " ".join(str(e).split())[:200]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    memory, hlo, weights = compiled.memory_analysis(), compiled.as_text(), arrays.get("weights")
    always, branches = thunk_kinds(text)
    figures = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "donated": memory.alias_size_in_bytes,
        "copied": {name: copied_bytes(hlo, local_shapes(tree)) for name, tree in arrays.items()},
        "written": written_bytes(hlo, set().union(*map(local_shapes, arrays.values()))),
        "collectives_per_layer": sum(len(re.findall(rf" {c}(?:-start)?\(", hlo)) for c in COLLECTIVES) / layers,
        "compile_s": round(seconds, 1),
    }
    if weights is not None:
        figures["weights"] = {"held": resident_bytes(weights), "read": weights_read(hlo, local_shapes(weights))}
    if text:
        figures["kernels_per_layer"] = sum(always[kind] for kind in KERNELS) / layers
        figures["kernels_in_branches"] = sum(branches[kind] for kind in KERNELS)
        figures |= {"thunks": dict(always + branches), "graphs": (always + branches)["CommandBuffer"]}
    cost = compiled.cost_analysis() or {}
    if "optimal_seconds" in cost:
        # The compiler adds -1 for each loop whose length it does not know: those are left out.
        figures["optimal_seconds"] = cost["optimal_seconds"] % 1
    return figures


def report(shapes, layout, devices, args) -> dict:
    """Compiles the programs of a system for a device that need not be here, and returns their figures."""
    import jax
    import jax.numpy as jnp

    from dflash_jax.decoding.state import Settings
    from dflash_jax.engine.config import largest_prefill
    from dflash_jax.engine.executables import GPU_OPTIONS, Executables
    from dflash_jax.engine.memory import pages_of_slots
    from dflash_jax.models.drafter import DraftVocabulary
    from dflash_jax.ops.cache import KVCache
    from dflash_jax.sampling_params import MAX_LOGPROBS

    # Executables for absent devices are written to the cache and cannot be read back.
    jax.config.update("jax_enable_compilation_cache", False)
    backend = backend_of(devices[0], args.kernels)
    target, drafter = abstract_pair(shapes, layout, jnp.bfloat16, args.quantize, backend)
    mesh = layout.mesh(devices)
    options = {} if ":" in args.device else GPU_OPTIONS
    window = 1
    if drafter is not None:
        window = args.block_size or shapes.draft.block_size
        if args.draft_tokens:
            shape = (args.draft_tokens, shapes.target.hidden_size)
            ids, head = jax.ShapeDtypeStruct(shape[:1], jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            drafter.vocabulary = DraftVocabulary(ids, head, backend)  # pyright: ignore[reportArgumentType]
    with_drafter, without = Executables(target, drafter, mesh), Executables(target, None, mesh)
    layers = len(shapes.target.layers)

    def is_kv(cache) -> bool:
        return isinstance(cache, KVCache)

    reports = {}
    for name in args.programs:
        programs = without if name == "plain" else with_drafter
        settings = Settings(window if name == "round" else 1, top_logprobs=MAX_LOGPROBS)
        pages = pages_of_slots(programs, args.slots, args.max_len, settings)
        state = programs.abstract_state(args.slots, args.max_len, settings, pages)
        caches = [c for c in (*state.target, *jax.tree.leaves(state.draft, is_leaf=is_kv)) if is_kv(c)]
        arrays = {
            "keys_and_values": caches,
            "recurrent_state": [c for c in state.target if not is_kv(c)],
            "weights": programs.weights,
        }
        if name == "prefill":
            lowered = programs.lower_prefill(state, layout.data, largest_prefill(backend.has_triton))
        else:
            lowered = programs.lower_decode(state, args.slots, settings)
        depth = layers + (len(shapes.draft.layers) if drafter is not None and name == "round" else 0)
        reports[name] = measure(lowered, depth, arrays, options)
    memory = DEVICES[args.device.partition(":")[0]].memory
    for figures in reports.values():
        if "failed" in figures:
            continue
        used = figures["arguments"] + figures["temporaries"] + figures["outputs"] - figures["donated"]
        figures |= {"all": used, "fits": used <= memory}
    return {
        "config": find_config(args.config).stem,
        "device": args.device,
        "mesh": str(layout),
        "slots": args.slots,
        "max_len": args.max_len,
        "jax": jax.__version__,
        "kernels": "triton" if backend.has_triton else "xla",
        "memory": memory,
        "programs": reports,
    }


def describe(figures: dict) -> str:
    """The report for people."""
    lines = [
        f"{figures['config']} on {figures['device']}, mesh {figures['mesh']}, "
        f"{figures['slots']} x {figures['max_len']:,}"
    ]
    for name, f in figures["programs"].items():
        if "failed" in f:
            lines.append(f"{name}: {f['failed']}")
            continue
        line = f"{name}: {f['all'] / 1e9:.2f} GB {'fits' if f['fits'] else 'DOES NOT FIT'} ("
        line += f"arguments {f['arguments'] / 1e9:.2f}, temporaries {f['temporaries'] / 1e9:.3f}), "
        if "kernels_per_layer" in f:
            line += f"{f['kernels_per_layer']:.1f} kernels a layer and {f['kernels_in_branches']} in branches, "
            line += f"{f['graphs']} graphs, "
        if "optimal_seconds" in f:
            line += f"compiler's estimate {1e3 * f['optimal_seconds']:.2f} ms, "
        line += f"{f['collectives_per_layer']:.1f} collectives a layer, "
        copied = ", ".join(f"{n / 1e6:.1f} MB of {name.replace('_', ' ')}" for name, n in f["copied"].items() if n)
        line += f"copied: {copied or 'no cache, state or weight'}, compiled in {f['compile_s']} s"
        lines.append(line)
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = Parser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", required=True, metavar="NAME|FILE", help="a name of configs/, or a TOML")
    p.add_argument("--device", required=True, metavar="NAME", help="h100, h200, b200, or a TPU slice such as v6e:2x4")
    p.add_argument("--devices", type=int, default=1, metavar="N", help="GPUs (default: %(default)s)")
    p.add_argument("--mesh", metavar="tensor=8", help="default: the config's for these devices")
    p.add_argument("--decode-context-parallel-size", type=int, default=1, metavar="N", help="default: %(default)s")
    p.add_argument("--slots", type=int, default=1, metavar="N", help="rows (default: %(default)s)")
    p.add_argument("--max-len", type=int, default=8192, metavar="N", help="default: %(default)s")
    p.add_argument("--quantize", choices=["int8", "fp8"])
    p.add_argument("--kernels", choices=CHOICES, default="auto", help="xla: without Triton kernels on a GPU")
    p.add_argument("--draft", choices=["mtp"], help="the target's own MTP head in place of the config's drafter")
    p.add_argument("--block-size", type=int, metavar="B", help="tokens of a round (default: the drafter's)")
    p.add_argument("--draft-tokens", type=int, metavar="N", help="number of tokens that are drafted (default: all)")
    p.add_argument("--layers", type=int, metavar="N", help="only the first N layers of the target")
    p.add_argument(
        "--programs", nargs="+", choices=["prefill", "plain", "round"], default=["prefill", "plain", "round"]
    )
    p.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    return p


def shorten(shapes, count: int):
    """The first ``count`` layers only; the drafter taps the last of them."""
    from dflash_jax.models.mtp_config import MtpConfig

    target = replace(shapes.target, layers=shapes.target.layers[:count])
    draft = shapes.draft
    if isinstance(draft, MtpConfig):
        draft = replace(draft, target=target)
    elif draft is not None:
        taps = tuple(min(i, count - 1) for i in draft.target_layer_ids)
        draft = replace(draft, target_layer_ids=taps, num_target_layers=count)
    return replace(shapes, target=target, draft=draft)


def run(args) -> int:
    """Prints a report: the exit code."""
    from dflash_jax.parallel.sharding import Layout

    name = args.device.partition(":")[0]
    if name not in DEVICES:
        raise InputError(f"device {args.device!r}: it must be one of {', '.join(DEVICES)}, TPUs with a slice")
    system = read_system(args.config)
    shapes = read_shapes(*(str(system.shapes[k]) for k in ("target", "target" if args.draft else "draft")))
    largest = 1 if shapes.draft is None else shapes.draft.block_size
    if args.block_size is not None and not 1 <= args.block_size <= largest:
        raise InputError(f"block size {args.block_size}: it must be 1 to {largest}")
    if args.layers:
        shapes = shorten(shapes, args.layers)
    try:
        devices = topology(args.device, args.devices)
    except Exception as e:  # the plugins raise many types: all mean that they are not there
        raise InputError(f"no compiler for {args.device} here: {' '.join(str(e).split())[:200]}") from None
    mesh = args.mesh if args.mesh is not None else system.mesh(DEVICES[name].kind, len(devices))
    layout = replace(Layout.parse(mesh), decode_context_parallel=args.decode_context_parallel_size)
    figures = report(shapes, layout, devices, args)
    print(json.dumps(figures) if args.json else describe(figures))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    prepare()
    return exit_code(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
