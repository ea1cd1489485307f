"""Will it fit? Bytes per device, the largest context and batch, what would fit, and the tokens a second at most.

Needs no weights and no accelerator: a name of configs/, a Hugging Face repository whose config is there, or a directory
with config.json is enough. The exit code is 1 where the system does not fit.
"""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dflash_jax.argument_checks import suggestion
from dflash_jax.cli.plan_changes import Change, Request, changes
from dflash_jax.errors import InputError
from dflash_jax.options.generate import command_parser
from dflash_jax.options.option import Add, option
from dflash_jax.options.shared import has_fp8_caches
from dflash_jax.options.systems import System, read_system, repositories, system_of
from dflash_jax.parallel.devices import DEVICES, Device, device_name, device_of_text
from dflash_jax.planner import USABLE, read_shapes
from dflash_jax.process import exit_code

# Largest count of slots, tokens or rounds, and the largest number of devices, of a plan.
MOST, MOST_DEVICES = 10**9, 2**16
DTYPES = ("float32", "bfloat16")
_count = partial(option, least=1, most=MOST)
_size = partial(option, least=0.001, most=999_999_999)


@dataclass(frozen=True)
class PlanOptions:
    """The options that only `dflash plan` has, or has in another form."""

    model: str | None = option(None, "a name of configs/, or what --target takes", "MODEL", flag="model")
    target: str | None = option(
        None,
        "directory with config.json, config.json itself, a repository of configs/, or such a TOML",
        "DIR|REPO|TOML",
    )
    draft: str | None = option(
        None, "default: the config's, or the repository's; else none", "DIR|REPO|mtp|none", action=Add
    )
    mesh: str | None = option(None, "default: the TOML's for the devices, else tensor=N", "data=2,tensor=4")
    decode_context_parallel_size: int | None = _count(
        None, "devices that share each page of keys and values in place of copies (default: the config's, else 1)", "N"
    )
    device: str | None = option(
        None,
        f"{', '.join(DEVICES)}, or as nvidia-smi names it (default: this machine's)",
        "NAME",
        read=device_of_text,
        choices=tuple(DEVICES),
    )
    all_devices: bool = option(False, "a table of the devices that --device lists")
    device_memory: float | None = _size(None, "of one device that --device does not list", "GB", further="--memory")
    bandwidth: float | None = _size(
        None, "of its memory, for the tokens a second", "GB/S", further="--memory-bandwidth"
    )
    devices: int | None = option(
        None, "how many of the device (default: 1; this machine's: all)", "N", least=1, most=MOST_DEVICES
    )
    dtype: str | None = option(None, "default: the config's, else float32 on a CPU, bfloat16 elsewhere", choices=DTYPES)
    max_len: int = _count(8192, "tokens of a slot", "N")
    slots: int = _count(1, "sequences at once", "N")
    context: int | None = _count(None, "for the tokens a second (default: 2048, or --max-len below that)", "N")
    acceptance_length: float | None = option(None, "default: 6, or the block size below that", "A")
    block_size: int | None = _count(None, "default: the drafter's", "B")
    json: bool = option(False, "one JSON object and nothing else")


SHARED = ("config", "quantize", "kv_cache_dtype", "draft_window_size", "language_model_only", "hf_overrides")
make_parser = partial(command_parser, "plan", __doc__, PlanOptions, SHARED)


def describe(plan: dict, request: Request, fitting: list[Change], drafters: list[str]) -> str:
    """The same for people, with the changes that fit and the published drafters of the target."""

    def gb(n: float) -> str:
        return f"{n / 1e9:.2f} GB"

    def slots(n: int) -> str:
        return f"{n:,} slot{'s' if n != 1 else ''}"

    size, count = plan["bytes_per_device"], plan["parameters"]
    left_out = " (left out)" if count["vision"] and not size["vision"] else ""
    vision = f"vision {gb(size['vision'])}, " if size["vision"] else ""
    parts = plan["decode_context_parallel_size"]
    divided = f", pages of keys and values in {parts} parts" if parts > 1 else ""
    lines = [
        f"parameters: target {count['target']:,}, drafter {count['drafter']:,}, vision{left_out} {count['vision']:,}",
        f"mesh {plan['mesh']}{divided}: {plan['devices']} x {request.name}, {gb(size['memory'])} each, "
        f"{USABLE:.0%} of it usable",
        f"per device: target {gb(size['target'])}, drafter {gb(size['drafter'])}, {vision}"
        f"{slots(plan['slots'])} of {plan['length']:,} tokens {gb(size['slots'])} "
        f"({size['cache_per_slot'] / 1e6:.1f} MB each, {size['cache_per_token'] / 1e3:.1f} kB a token), "
        f"workspace about {gb(size['workspace'])}: {gb(size['all'])} in all",
        f"{'fits' if plan['fits'] else 'DOES NOT FIT'}: at most {slots(plan['max_slots'])} of "
        f"{plan['length']:,} tokens, or {slots(plan['slots'])} of {plan['max_len']:,}",
        *([would_fit(fitting)] if not plan["fits"] else []),
        f"pages are given as tokens come: {slots(plan['sequences'])} fit while each has {request.context:,} tokens",
    ]
    if plan["not_used"]:
        lines.append(f"not used: {', '.join(plan['not_used'])}")
    if len(drafters) > 1:
        lines.append(f"published drafters, for --draft: {', '.join(drafters)}")
    big = {k: v for k, v in plan["replicated"].items() if v >= 1e6}
    if big and plan["devices"] > 1:
        shown = ", ".join(f"{k} {v / 1e6:.1f} MB" for k, v in sorted(big.items(), key=lambda kv: -kv[1])[:6])
        lines.append(f"held by several devices alike, as their dimensions do not divide further: {shown}")
    if plan["floor_tokens_per_s"] is None:
        lines.append("tokens a second: not known without the device's memory bandwidth")
        return "\n".join(lines)
    plain, drafted = plan["floor_tokens_per_s_autoregressive"], plan["floor_tokens_per_s"]
    rate = f", {drafted:.0f} tok/s at acceptance length {request.acceptance_length:g}" if request.shapes.draft else ""
    lines.append(
        f"at most {plain:.0f} tok/s plain{rate} ({slots(plan['slots'])} together, {request.context:,} tokens of "
        "context each): memory bandwidth allows no more"
    )
    return "\n".join(lines)


def would_fit(fitting: list[Change]) -> str:
    """The line that names the changes that fit."""
    return f"would fit: {'; or '.join(map(str, fitting))}" if fitting else "no change that was planned fits"


def table(requests: dict[str, Request], plans: dict[str, dict]) -> str:
    """One line per device, for people."""
    first = next(iter(requests.values()))
    heads = ["device", "devices", "memory", "needed", "fits", "max slots", "max len", "plain", "drafted", "would fit"]
    rows = []
    for name, plan in plans.items():
        size = plan["bytes_per_device"]
        fitting = [] if plan["fits"] else [c for c in changes(requests[name]) if c.options[0] != "--device"]
        rates = (plan["floor_tokens_per_s_autoregressive"], plan["floor_tokens_per_s"] if first.shapes.draft else None)
        rows.append(
            [
                name,
                str(plan["devices"]),
                f"{size['memory'] / 1e9:.1f} GB",
                f"{size['all'] / 1e9:.1f} GB",
                "yes" if plan["fits"] else "no",
                f"{plan['max_slots']:,}",
                f"{plan['max_len']:,}",
                *(f"{rate:,.0f}" if plan["fits"] and rate is not None else "-" for rate in rates),
                " or ".join(change.text for change in fitting[:2]) or "-",
            ]
        )
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        f"{first.slots} slot{'s' if first.slots != 1 else ''} of {first.max_len:,} tokens. Memory is of one device, "
        f"{USABLE:.0%} of it usable. Plain and drafted are tokens a second",
        f"at most, all slots together, with {first.context:,} tokens of context each and acceptance length "
        f"{first.acceptance_length:g}.",
    ]
    for cells in (heads, *rows):
        # Words to the left, numbers to the right.
        aligned = (
            c.ljust(w) if i in (0, 4, 9) else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def this_machine() -> tuple[Device, str, int]:
    """The device of this machine, its name, and how many there are; a CPU is one device.

    Memory is that of `DEVICES`, else what JAX may allocate; the bandwidth of a device that is not listed is not known.
    """
    # The plan allocates nothing on the device, which may be in use.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from dflash_jax.engine.memory import device_memory

    try:
        devices = jax.local_devices()
    except RuntimeError as e:
        raise InputError(f"JAX has no device on this machine ({str(e).splitlines()[0]}): give --device") from None
    kind, count = devices[0].device_kind, len(devices)
    if devices[0].platform == "cpu":
        return Device("cpu", device_memory() * count, 0.0), "cpu of this machine", 1
    name = device_name(kind)
    return (DEVICES[name], name, count) if name else (Device(kind, device_memory(), 0.0), kind, count)


def chosen_device(args) -> tuple[Device, str, int]:
    """What is planned for, its name, and how many there are by default.

    Raises:
        InputError: Options contradict each other.
    """
    if args.device_memory is None and args.bandwidth is None:
        return (DEVICES[args.device], args.device, 1) if args.device is not None else this_machine()
    if args.device is not None:
        raise InputError("--device names the memory and bandwidth: leave --device-memory and --bandwidth out")
    if args.device_memory is None:
        raise InputError("--bandwidth goes with --device-memory: it describes a device that --device does not list")
    name = f"device of {args.device_memory:g} GB"
    return Device("", round(1e9 * args.device_memory), 1e9 * (args.bandwidth or 0.0)), name, 1


def find_shapes(name: str, kind: str) -> str:
    """The directory or config.json that ``name`` is, or the config of the repository: of configs/, else of the cache.

    Args:
        name: A path or a Hugging Face repository id.
        kind: "target" or "draft".

    Raises:
        InputError: There is none, or ``name`` is not a path that can be read.
    """
    if os.path.exists(name):
        return name
    known = repositories(kind)
    is_known = name.lower() in map(str.lower, known)
    if path := next((path for repo, path in known.items() if path and repo.lower() == name.lower()), None):
        return str(path)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        example = {"target": "Qwen/Qwen3-8B", "draft": "z-lab/Qwen3-8B-DFlash-b16, or none"}[kind]
        raise InputError(f"{kind} {name!r} does not exist: give a directory, or a repository such as {example}")
    from huggingface_hub import try_to_load_from_cache

    # A path where the config was downloaded before; nothing is downloaded here.
    with suppress(OSError, ValueError):
        if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
            return cached
    if is_known:
        raise InputError(f"{kind} {name!r} is published, and its config is not here: hf download {name} config.json")
    hint = suggestion(name, list(known), 3)
    raise InputError(f"{kind} {name!r} is neither a directory nor a repository whose config is here: {hint}")


def read_models(args) -> tuple[str, str | None, System | None]:
    """Config files or directories of target and drafter (None: no drafter), and the system that names them.

    Raises:
        InputError: There is no target, or a name is not known.
    """
    config, target = args.config, args.target
    if args.model is not None:
        if config or target:
            raise InputError(f"{args.model!r} and --{'config' if config else 'target'} both name the model: give one")
        is_target = "/" in args.model or os.path.isdir(args.model) or args.model.endswith(".json")
        config, target = (None, args.model) if is_target else (args.model, None)
    if target and target.endswith(".toml"):
        config, target = target, None
    system = None
    if config:
        repository = None if os.path.exists(config) else system_of(config)
        system = repository or read_system(config)
    elif target and not os.path.exists(target):
        system = system_of(target)
    shapes = {kind: str(path) for kind, path in system.shapes.items()} if system else {}
    options = system.options if system else {}
    target = target or shapes.get("target") or options.get("target")
    if not target:
        raise InputError("no target: give a model, such as qwen3-8b or Qwen/Qwen3-8B, --target or --config")
    given = args.draft or options.get("draft")
    if isinstance(given, list) and len(given) > 1:
        raise InputError(f"draft {given}: plan sizes a system with one drafter")
    draft = args.draft or shapes.get("draft") or given
    draft = draft[0] if isinstance(draft, list) else draft
    target = find_shapes(target, "target")
    if draft in (None, "none", "mtp"):
        return target, target if draft == "mtp" else None, system
    return target, find_shapes(draft, "draft"), system


def read_mesh(args, system: System | None, device: Device, count: int) -> str:
    """The mesh: --mesh, else the config's for the devices, else, for --devices, all of them on the tensor axis."""
    from dflash_jax.parallel.sharding import Layout

    if args.mesh is not None:
        return args.mesh
    mesh = system.mesh(device.kind, args.devices or count) if system else ""
    if args.devices is None or Layout.parse(mesh).devices == args.devices:
        return mesh
    return f"tensor={args.devices}"


def run(args) -> int:
    """Prints a plan: the exit code, 1 where the system does not fit (with --all-devices: on no device)."""
    target, draft, system = read_models(args)
    if args.all_devices:
        if args.device is not None or args.device_memory is not None or args.bandwidth is not None:
            raise InputError("--all-devices takes each device in turn: leave --device and its figures out")
        devices = {name: (device, name, 1) for name, device in DEVICES.items()}
    else:
        device, name, count = chosen_device(args)
        devices = {name: (device, name, count)}
    import jax

    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp

    from dflash_jax.checkpoint.config_files import read_raw
    from dflash_jax.checkpoint.quantization import without_format
    from dflash_jax.parallel.sharding import Layout

    options = system.options if system else {}
    overrides = args.hf_overrides or options.get("hf_overrides")
    shapes = read_shapes(target, draft, overrides=overrides)
    shapes = replace(shapes, language_model_only=args.language_model_only)
    if args.max_len > shapes.target.max_positions:
        raise InputError(f"max_len is {args.max_len}: the model has {shapes.target.max_positions} positions")
    block = args.block_size or (shapes.draft.block_size if shapes.draft else 1)
    acceptance_length = min(6.0, block) if args.acceptance_length is None else args.acceptance_length
    if not 1 <= acceptance_length <= (block if shapes.draft else MOST):
        raise InputError(f"acceptance_length is {acceptance_length:g}: it must be from 1 to the block size, {block}")
    parts = args.decode_context_parallel_size or options.get("decode_context_parallel_size", 1)
    requests = {}
    for device, name, count in devices.values():
        layout = replace(Layout.parse(read_mesh(args, system, device, count)), decode_context_parallel=parts)
        if layout.devices > MOST_DEVICES:
            raise InputError(f"mesh {layout} has {layout.devices} devices: it must have {MOST_DEVICES:,} or fewer")
        dtype = args.dtype or options.get("dtype") or ("float32" if device.platform == "cpu" else "bfloat16")
        if dtype not in DTYPES:
            raise InputError(f"config {args.config}: dtype is {dtype!r}: it must be {' or '.join(DTYPES)}")
        requests[name] = Request(
            shapes,
            layout,
            device,
            name,
            getattr(jnp, dtype),
            args.slots,
            args.max_len,
            args.context or min(2048, args.max_len),
            acceptance_length,
            block,
            without_format(args.quantize or options.get("quantize"), read_raw(Path(target), overrides), Path(target)),
            args.draft_window_size or options.get("draft_window_size"),
            has_fp8_caches(args.kv_cache_dtype or options.get("kv_cache_dtype"), dtype),
        )
    plans = {name: request.plan() for name, request in requests.items()}
    if args.all_devices:
        print(json.dumps({"plans": plans}) if args.json else table(requests, plans))
        return 0 if any(plan["fits"] for plan in plans.values()) else 1
    (request,), (plan,) = requests.values(), plans.values()
    fitting = [] if plan["fits"] else changes(request)
    drafters = list(system.repositories("draft")) if system and "draft" in system.options else []
    would = [{"text": change.text, "options": list(change.options)} for change in fitting]
    print(json.dumps(plan | {"would_fit": would}) if args.json else describe(plan, request, fitting, drafters))
    return 0 if plan["fits"] else 1


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return exit_code(lambda: run(make_parser().parse_args(argv)))
