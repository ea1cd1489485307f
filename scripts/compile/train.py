"""Does a training step fit? Compiled at full size for accelerators that this machine need not have.

    python scripts/compile/train.py qwen3.6-35b-a3b --device b200 --devices 8

Takes shapes from configs/NAME.toml and the recipe and mesh from configs/train/NAME.toml; needs what report.py needs.
Without NAME: every row of benchmarks/training.md, and one of four layers, that is not in benchmarks/training.json yet.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from dflash_jax import planner
from dflash_jax.errors import InputError
from dflash_jax.options.parser import Parser
from dflash_jax.options.systems import read_system
from dflash_jax.options.train import TrainConfig, read_toml
from dflash_jax.parallel.devices import DEVICES, mesh_for
from dflash_jax.planner import read_shapes
from dflash_jax.process import exit_code
from tools import compile_report as report

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "benchmarks" / "training.json"
ROWS = [
    "qwen3.6-35b-a3b --device b200 --devices 8",
    "qwen3.5-27b --device b200 --devices 8",
    "qwen3.6-35b-a3b --device v6e:2x4",
    "qwen3.5-27b --device v6e:2x4",
    "qwen3.5-27b --device v6e:2x4 --accumulate 8",
    "qwen3.6-35b-a3b --device v5p:2x2x2",
    "qwen3.5-27b --device v5p:2x2x2",
]
# What tests/tools/test_compile_report.py compares with.
FOUR_LAYERS = ["qwen3.6-35b-a3b --device b200 --devices 8 --layers 4"]
INTRODUCTION = """# A training step, compiled

One step of `python -m dflash_jax.train fit` at full size, compiled for accelerators that were not there: nothing here
has run on one. `python scripts/compile/train.py`. GB per device; arguments: target, drafter, optimiser, batch. FLOPs
by arithmetic, two for each weight that a token meets: the target once, the drafter three times, its head three times
(the logits are computed again for the gradient). Hours: of a billion tokens, at the PFLOP/s that the maker states for
dense bfloat16 and 40 % of it; the paper's recipe, 4.8 million sequences, is about ten of them. In parentheses: with
every expert computed for every token, as it is on TPUs; on GPUs an expert is computed for those who chose it.

| row | mesh | rows × tokens, anchors | GB | arguments | temporaries | collectives | GFLOP/token | hours | compiled s |
|---|---|---|---|---|---|---|---|---|---|
"""
UTILISATION, TOKENS = 0.4, 1e9


def flops_a_token(shapes, config) -> tuple[float, float]:
    """(needed, with all experts for all tokens)."""
    import jax.numpy as jnp

    from dflash_jax.models.decoder import abstract_decoder
    from dflash_jax.models.drafters import abstract_drafter
    from dflash_jax.parallel.sharding import ONE_DEVICE

    def weigh(module):
        return planner.weigh(module, ONE_DEVICE)

    target = weigh(abstract_decoder(shapes.target, jnp.bfloat16))
    drafter, head = (
        weigh(abstract_drafter(shapes.draft, jnp.bfloat16)),
        shapes.target.vocab_size * shapes.target.hidden_size,
    )
    slots = shapes.draft.block_size * config.anchors / config.sequence_length
    training = 6 * slots * drafter.parameters + 6 * slots * head
    body = target.total - target.lookup - target.head
    dense = body - target.experts * target.expert
    return training + dense + target.per_token * target.expert, training + body


def lowered(name: str, args):
    """(the step, shapes, mesh, recipe)"""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from dflash_jax.models.config import DraftConfig
    from dflash_jax.models.drafter import Drafter
    from dflash_jax.parallel.sharding import DATA, Layout
    from dflash_jax.training.losses import Loss, default_gamma
    from dflash_jax.training.optimiser import optimiser
    from dflash_jax.training.step import Batch, Recipe, Trainer

    jax.config.update("jax_enable_compilation_cache", False)
    values, meshes = read_toml(name)
    if args.accumulate:
        values["accumulate"] = args.accumulate
    config, system = TrainConfig(**values), read_system(name)
    shapes = read_shapes(*(str(system.shapes[k]) for k in ("target", "draft")))
    if args.layers:
        shapes = report.shorten(shapes, args.layers)
    assert shapes.draft is not None, f"{name} has no drafter"
    devices = report.topology(args.device, args.devices)
    backend = report.backend_of(devices[0], "auto")
    mesh = mesh_for(meshes, DEVICES[args.device.partition(":")[0]].kind, len(devices))
    layout = Layout.parse(args.mesh if args.mesh is not None else mesh)
    target, _ = planner.abstract_pair(shapes, layout, jnp.bfloat16, None, backend)
    assert isinstance(shapes.draft, DraftConfig), "pairs of configs/train/ have DFlash drafters"
    block = shapes.draft.block_size
    loss = Loss(config.loss, config.loss_weights, default_gamma(block), chunk=config.loss_chunk)
    update = optimiser(config.learning_rate, 1000, config.optimizer)
    trainer = Trainer(
        target, shapes.draft, Recipe(loss, config.anchors, block, "bfloat16"), update, layout.mesh(devices)
    )
    drafter = Drafter(shapes.draft, rngs=None, backend=backend)
    state = jax.eval_shape(lambda d: (d, update.init(d)), drafter)

    def at(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = jax.tree.map(at, state, trainer.shardings())
    shape, cut = (
        (config.accumulate, config.rows // config.accumulate, config.sequence_length),
        PartitionSpec(None, DATA),
    )
    ids, mask = (jax.ShapeDtypeStruct(shape, kind, sharding=trainer.sharding(cut)) for kind in (jnp.int32, jnp.bool_))
    # Shapes stand for the arrays.
    batch = Batch(ids, mask, ids)  # pyright: ignore[reportArgumentType]
    key = at(jax.eval_shape(lambda: jax.random.key(0)), trainer.sharding(PartitionSpec()))
    step = trainer.step.lower(state, trainer.leaves, batch, key)
    return step, shapes, layout, config


def measure(name: str, args) -> dict:
    step, shapes, layout, config = lowered(name, args)
    device = DEVICES[args.device.partition(":")[0]]
    found, _ = report.measure(step, len(shapes.target.layers), {}, device.platform, None)
    if "failed" not in found:
        used = found["arguments"] + found["temporaries"] + found["outputs"] - found["donated"]
        found |= {"all": used, "fits": used <= device.memory}
    sizes = {"rows": config.rows, "sequence_length": config.sequence_length, "anchors": config.anchors}
    needed, computed = flops_a_token(shapes, config)
    return {"mesh": str(layout), **sizes, "flops_a_token": needed, "flops_computed": computed, "step": found}


def table(rows: dict[str, dict]) -> str:
    lines = []
    for command, row in rows.items():
        f = row.get("step", row)
        if "failed" in f:
            lines.append(f"| `{command}` | {row.get('mesh', '')} | | {f['failed']} | | | | | | |")
            continue
        fits = "" if f["fits"] else " **does not fit**"
        shape = f"{row['rows']} × {row['sequence_length']:,}, {row['anchors']}"
        device = command.split("--device ")[1].partition(" ")[0].partition(":")[0]
        rate = UTILISATION * DEVICES[device].operations * 8
        needed, computed = row["flops_a_token"], row["flops_computed"]
        cost = f"{needed / 1e9:.1f} | {TOKENS * needed / rate / 3600:.1f}"
        if computed > needed and ":" in command:
            cost += f" ({TOKENS * computed / rate / 3600:.1f})"
        lines.append(
            f"| `{command}` | {row['mesh']} | {shape} | {f['all'] / 1e9:.1f}{fits} | {f['arguments'] / 1e9:.1f} | "
            f"{f['temporaries'] / 1e9:.1f} | {f['collectives_per_layer']:.1f} | {cost} | {f['compile_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def every_row() -> int:
    held = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for command in ROWS + FOUR_LAYERS:
        if "step" not in held.get(command, {}):
            print(command, flush=True)
            # The compilers keep what they have: each gets a process.
            done = subprocess.run([sys.executable, __file__, *command.split()], capture_output=True, text=True)
            last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:200]
            held[command] = json.loads(done.stdout) if done.returncode == 0 else {"failed": last}
        rows = {c: held[c] for c in ROWS + FOUR_LAYERS if c in held}
        FIGURES.write_text(json.dumps(rows, indent=1) + "\n")
        FIGURES.with_suffix(".md").write_text(INTRODUCTION + table({c: r for c, r in rows.items() if c in ROWS}))
    return 0


def run(args) -> int:
    if args.name is None:
        return every_row()
    if args.device is None:
        raise InputError("--device is missing: h100, h200, b200, or a TPU slice such as v6e:2x4")
    print(json.dumps(measure(args.name, args)))
    return 0


def main(argv: list[str] | None = None) -> int:
    report.prepare()
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name", nargs="?", help="a pair of configs/train/")
    p.add_argument("--device", metavar="NAME")
    p.add_argument("--devices", type=int, default=1, metavar="N", help="GPUs (default: %(default)s)")
    p.add_argument("--mesh", metavar="data=8", help="default: the config's for these devices")
    p.add_argument("--accumulate", type=int, metavar="N", help="parts of a step (default: the config's)")
    p.add_argument("--layers", type=int, metavar="N", help="only the first N layers of the target")
    return exit_code(lambda: run(p.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
