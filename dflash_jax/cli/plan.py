"""Will it fit? Bytes per device, the largest context and batch, and the bandwidth floor.

Needs no weights and no accelerator: a directory with config.json, or a TOML of configs/, is enough.
"""

import argparse
import json

from dflash_jax.errors import InputError
from dflash_jax.parallel.devices import DEVICES, Device
from dflash_jax.planner import USABLE, make_plan, read_shapes


def describe(plan: dict, args, name: str) -> str:
    """The same for people."""

    def gb(n: float) -> str:
        return f"{n / 1e9:.2f} GB"

    size, count = plan["bytes_per_device"], plan["parameters"]
    lines = [
        f"parameters: target {count['target']:,}, drafter {count['drafter']:,}, vision (left out) {count['vision']:,}",
        f"mesh {plan['mesh']}: {plan['devices']} x {name}, {gb(size['memory'])} each, {USABLE:.0%} of it usable",
        f"per device: target {gb(size['target'])}, drafter {gb(size['drafter'])}, "
        f"{plan['slots']} slots of {plan['length']:,} tokens {gb(plan['dense_slots'])} "
        f"({size['cache_per_slot'] / 1e6:.1f} MB each, {size['cache_per_token'] / 1e3:.1f} kB a token), "
        f"workspace about {gb(size['workspace'])}: {gb(size['all'])} in all",
        f"{'fits' if plan['fits'] else 'DOES NOT FIT'}: at most {plan['max_slots']} slots of {plan['length']:,} "
        f"tokens, or {plan['slots']} slots of {plan['max_len']:,}",
        f"dense slots hold {gb(plan['dense_slots'])}; rows half full would need {gb(plan['exact_lengths_half_full'])}",
    ]
    big = {k: v for k, v in plan["replicated"].items() if v >= 1e6}
    if big and plan["devices"] > 1:
        shown = ", ".join(f"{k} {v / 1e6:.1f} MB" for k, v in sorted(big.items(), key=lambda kv: -kv[1])[:6])
        lines.append(f"held by several devices alike, as their dimensions do not divide further: {shown}")
    lines.append(
        f"bandwidth floor at {args.context:,} tokens of context: {plan['floor_tokens_per_s_autoregressive']:.0f} tok/s "
        f"plain, {plan['floor_tokens_per_s']:.0f} tok/s at acceptance length {args.acceptance_length:g} "
        f"(all {plan['slots']} slots together)"
    )
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    from dflash_jax.cli.options import Parser, program

    p = Parser(prog=program("plan"), description=__doc__, allow_abbrev=False)
    p.add_argument("--config", metavar="NAME|FILE", help="a name of configs/, or a TOML; options override it")
    p.add_argument(
        "--target", metavar="DIR|TOML", help="directory with config.json, config.json itself, or such a TOML"
    )
    p.add_argument("--draft", metavar="DIR|none")
    p.add_argument("--mesh", metavar="data=2,tensor=4", help="default: the TOML's for the devices, or one device")
    p.add_argument("--device", choices=DEVICES, help="default: b200")
    p.add_argument("--device-memory", type=float, metavar="GB", help="of one device, where --device does not name it")
    p.add_argument("--bandwidth", type=float, metavar="GB/S", help="of its memory; with --device-memory")
    p.add_argument("--devices", type=int, default=1, metavar="N", help="how many, to choose the TOML's mesh")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="default: %(default)s")
    p.add_argument("--quantize", choices=["none", "int8", "fp8"])
    p.add_argument("--max-len", type=int, default=8192, metavar="N", help="tokens of a slot (default: %(default)s)")
    p.add_argument("--slots", type=int, default=1, metavar="N", help="rows at once (default: %(default)s)")
    p.add_argument("--context", type=int, default=2048, metavar="N", help="for the floor (default: %(default)s)")
    p.add_argument("--acceptance-length", type=float, default=6.0, metavar="A", help="default: %(default)s")
    p.add_argument("--block-size", type=int, default=None, metavar="B", help="default: the drafter's")
    p.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    return p


def chosen_device(args) -> tuple[Device, str]:
    """What is planned for, and its name. Raises InputError where the options contradict each other."""
    if args.device_memory is None and args.bandwidth is None:
        name = args.device or "b200"
        return DEVICES[name], name
    if args.device is not None:
        raise InputError("--device names the memory and bandwidth: leave --device-memory and --bandwidth out")
    if args.device_memory is None or args.bandwidth is None:
        raise InputError("--device-memory and --bandwidth go together")
    for option, value, unit in (("--device-memory", args.device_memory, "GB"), ("--bandwidth", args.bandwidth, "GB/s")):
        if not 0 < value < 1e9:
            raise InputError(f"{option} {value:g}: it must be above 0 and below a billion {unit}")
    return Device("", round(1e9 * args.device_memory), 1e9 * args.bandwidth), "device"


def run(args) -> int:
    """Prints a plan: the exit code."""
    if args.target and args.target.endswith(".toml"):
        args.config, args.target = args.target, None
    target, draft, mesh = args.target, args.draft, args.mesh
    device, name = chosen_device(args)
    if args.config:
        from dflash_jax.cli.system_config import read_system

        system = read_system(args.config)
        target = target or str(system.shapes.get("target") or system.options.get("target"))
        draft = draft or str(system.shapes.get("draft") or system.options.get("draft") or "none")
        if mesh is None and args.device_memory is not None and args.devices > 1:
            raise InputError(f"--devices {args.devices} without a name: give --mesh")
        mesh = system.mesh(device.kind, args.devices) if mesh is None else mesh
    if not target:
        raise InputError("no target: give --target or --config")
    for option in ("max_len", "slots", "devices", "context"):
        if getattr(args, option) < 1:
            raise InputError(f"{option} is {getattr(args, option)}: it must be 1 or more")
    import jax

    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp

    from dflash_jax.parallel.sharding import Layout

    shapes = read_shapes(target, None if draft in (None, "none") else draft)
    if args.max_len > shapes.target.max_positions:
        raise InputError(f"max_len is {args.max_len}: the model has {shapes.target.max_positions} positions")
    plan = make_plan(
        shapes,
        Layout.parse(mesh or ""),
        device,
        dtype={"float32": jnp.float32, "bfloat16": jnp.bfloat16}[args.dtype],
        slots=args.slots,
        max_len=args.max_len,
        context=args.context,
        acceptance_length=args.acceptance_length,
        block=args.block_size or (shapes.draft.block_size if shapes.draft else 1),
        quantize=args.quantize,
    )
    print(json.dumps(plan) if args.json else describe(plan, args, name))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    from dflash_jax.cli.options import exit_code

    return exit_code(lambda: run(make_parser().parse_args(argv)))
