"""Which implementation each operation takes for a system on a device, and why those before it in the list do not.

Needs no weights, and the device need not be here: programs are traced with shapes in place of arrays.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dflash_jax.checkpoint.quantize import QUANTIZE
from dflash_jax.errors import InputError
from dflash_jax.models.config import VisionConfig
from dflash_jax.ops.card import Card
from dflash_jax.options.generate import command_parser
from dflash_jax.options.option import option
from dflash_jax.options.shared import has_fp8_caches
from dflash_jax.options.systems import read_system
from dflash_jax.parallel.devices import DEVICES, device_of_text
from dflash_jax.planner import Shapes, abstract_pair, read_shapes
from dflash_jax.process import exit_code

if TYPE_CHECKING:
    from dflash_jax.ops.backend import Backend, Choice

PROGRAMS = ("prefill", "plain step", "round")
VISION = "vision tower"
_count = partial(option, least=1, most=2**16)


@dataclass(frozen=True)
class OpsOptions:
    """The options that only `dflash ops` has, or has in another form."""

    config: str | None = option(None, "a name of configs/, or a TOML", "NAME|FILE", is_required=True)
    device: str | None = option(
        None,
        f"cpu, {', '.join(DEVICES)}, or as nvidia-smi names it (default: this machine's)",
        "NAME",
        read=lambda text: text if text == "cpu" else device_of_text(text),
        choices=("cpu", *DEVICES),
    )
    dtype: str | None = option(None, "default: float32 on a CPU, bfloat16 elsewhere", choices=("float32", "bfloat16"))
    quantize: str | None = option(None, "default: as the checkpoint is", choices=QUANTIZE[1:])
    batch: int = _count(1, "sequences that decode", "N")
    prompt: int = _count(1024, "tokens of a chunk", "N")
    json: bool = option(False, "one JSON object a program, one a line")


make_parser = partial(command_parser, "ops", __doc__, OpsOptions, ("kernels", "kv_cache_dtype", "activations"))


def backend_for(device: str | None, kernels: str) -> "Backend":
    """The backend of a device by its name in `DEVICES`, of "cpu", or, for None, of this machine.

    Raises:
        InputError: Triton's kernels cannot be traced, since Triton is not installed.
    """
    from dflash_jax.ops.backend import Backend

    if device is None:
        return Backend.detect(kernels)
    if device == "cpu":
        import jax

        return Backend.of_device(jax.devices("cpu")[0], kernels)
    capability = DEVICES[device].capability
    if capability is None:
        return Backend.for_tpu(kernels, DEVICES[device].kind)
    card = Card.of_capability(capability)
    if kernels == "xla":
        return Backend.xla("cuda", card)
    if find_spec("triton") is None:
        raise InputError("Triton is not installed, so that its kernels cannot be traced: pip install triton")
    return Backend.for_card(card, kernels)


def choices(
    shapes: Shapes,
    backend: "Backend",
    dtype,
    batch: int,
    prompt: int,
    quantize: str | None,
    has_fp8_caches: bool = False,
) -> Iterator:
    """(program, its `Choice`s, each once in the order of the first)."""
    import jax
    import jax.numpy as jnp

    from dflash_jax.decoding import speculative
    from dflash_jax.decoding.prefill import prefill_chunk
    from dflash_jax.decoding.state import Settings, empty_state
    from dflash_jax.models.packing import pack_weights
    from dflash_jax.parallel.sharding import ONE_DEVICE

    seen: list[Choice] = []
    backend = replace(backend, on_choice=seen.append)
    target, drafter = abstract_pair(shapes, ONE_DEVICE, dtype, quantize, backend, has_fp8_caches)
    if backend.has_cpp and dtype == jnp.float32:
        target, drafter = pack_weights(target), drafter and pack_weights(drafter)
    block = shapes.draft.block_size if shapes.draft is not None else 1
    for name in PROGRAMS if drafter is not None else PROGRAMS[:2]:
        settings = Settings(block if name == "round" else 1)
        state = jax.eval_shape(partial(empty_state, target, drafter, batch, 2 * prompt, settings))
        pair = (target, drafter if name == "round" else None)
        step: Callable[..., object] = (
            partial(prefill_chunk, size=prompt)
            if name == "prefill"
            else partial(speculative.decode_round, settings=settings)
        )
        seen.clear()

        # Another function each time: JAX keeps what it traced of one.
        def call(pair, state, step: Callable[..., object] = step) -> object:
            return step(*pair, state)

        with _recorded_launches():
            jax.eval_shape(call, pair, state)
        yield name, list(dict.fromkeys(seen))
    if (config := shapes.target.vision) is not None:
        yield VISION, _tower_choices(config, backend, dtype, prompt)


def _tower_choices(config: VisionConfig, backend: "Backend", dtype, prompt: int) -> "list[Choice]":
    """The choices of a pass over as many patches as the images of a prompt may have."""
    import jax

    from dflash_jax.engine.vision_encoder import SIZES, call_arguments
    from dflash_jax.models.vision import VisionTower, abstract_tower

    seen: list[Choice] = []
    tower = abstract_tower(config, dtype, replace(backend, on_choice=seen.append))
    patches = next((size for size in SIZES if size >= prompt * config.block_patches), SIZES[-1])
    with _recorded_launches():
        jax.eval_shape(lambda tower, given: VisionTower.__call__(tower, **given), tower, call_arguments(tower, patches))
    return list(dict.fromkeys(seen))


def _recorded_launches():
    """Inside, Triton's kernels return shapes and are not compiled."""
    import jax.numpy as jnp

    from dflash_jax.ops.kernels.triton.launch import launching

    def stub(launch) -> tuple:
        written = [launch.args[i] for i in launch.in_place] + list(launch.out)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in written)

    return launching(stub)


def as_json(choice: "Choice") -> dict[str, object]:
    """A choice as ``--json`` prints it."""
    return {"taken" if key == "implementation" else key: value for key, value in asdict(choice).items()}


def describe(name: str, choices: "list[Choice]") -> str:
    """The choices of one program for people: an operation, its implementation, and the reasons before it."""
    lines = [f"{name}:"]
    for op in dict.fromkeys(choice.op for choice in choices):
        each = [choice for choice in choices if choice.op == op]
        for choice in {(c.implementation, c.passed_over): c for c in each}.values():
            shape = f" ({choice.shapes[0]})" if len({c.implementation for c in each}) > 1 and choice.shapes else ""
            lines.append(f"  {op}: {choice.implementation}{shape}")
            lines += [f"      not {passed}: {reason}" for passed, reason in choice.passed_over]
    return "\n".join(lines)


def run(args) -> int:
    """Prints the implementation of each operation: the exit code."""
    import jax.numpy as jnp

    system = read_system(args.config)
    if "target" not in system.shapes:
        raise InputError(f"config {args.config} has no shapes: it must name a target's config.json under [shapes]")
    draft = system.shapes.get("draft")
    shapes = read_shapes(str(system.shapes["target"]), None if draft is None else str(draft))
    backend = replace(backend_for(args.device, args.kernels), fp4_activations=args.activations == "fp4")
    dtype = jnp.dtype(args.dtype or ("float32" if backend.platform == "cpu" else "bfloat16"))
    fp8 = has_fp8_caches(args.kv_cache_dtype, dtype.name)
    if backend.has_triton and not args.json:
        joined = "those that follow one another in one call, which no card has run (docs/ops.md)"
        print(f"launches of Triton kernels: {joined if backend.joins_launches else 'each in a call, by jax-triton'}")
    for name, found in choices(shapes, backend, dtype, args.batch, args.prompt, args.quantize, fp8):
        if args.json:
            print(json.dumps({"program": name, "choices": [as_json(choice) for choice in found]}))
        else:
            print(describe(name, found))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return exit_code(lambda: run(make_parser().parse_args(argv)))
