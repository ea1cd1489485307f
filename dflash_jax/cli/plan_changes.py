"""What makes a system fit that does not: every change is planned before it is named."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dflash_jax.errors import InputError
from dflash_jax.parallel.devices import DEVICES, Device
from dflash_jax.planner import Shapes, has_few_bits, make_plan

if TYPE_CHECKING:
    from dflash_jax.parallel.sharding import Layout

# Number of devices at most that a change names.
LIMIT = 64
NUMBERS = {1: "one", 2: "two", 4: "four", 8: "eight"}


@dataclass(frozen=True)
class Request:
    """What is planned: the arguments of `make_plan`, which explains them, and the device's name.

    Attributes:
        name: The device, as a plan prints it.
    """

    shapes: Shapes
    layout: "Layout"
    device: Device
    name: str
    dtype: Any
    slots: int
    max_len: int
    context: int
    acceptance_length: float
    block: int
    quantize: str | None
    draft_window_size: int | None = None
    has_fp8_caches: bool = False

    def plan(self) -> dict:
        """The plan of this request."""
        fields = {name: value for name, value in vars(self).items() if name != "name"}
        return make_plan(fields.pop("shapes"), fields.pop("layout"), fields.pop("device"), **fields)

    def fits(self) -> bool:
        """Whether the plan fits; False for a mesh that the model cannot be divided on."""
        try:
            return self.plan()["fits"]
        except InputError:
            return False


@dataclass(frozen=True)
class Change:
    """A change that makes a request fit.

    Attributes:
        text: The change for people, such as "two H100", or the options themselves.
        options: The options that make the change on the command line.
        request: The request after the change.
    """

    text: str
    options: tuple[str, ...]
    request: Request

    def __str__(self) -> str:
        options = " ".join(self.options)
        return self.text if self.text == options else f"{self.text} ({options})"

    def then(self, other: "Change") -> "Change":
        """This change and ``other``, which is of the request after it."""
        return Change(f"{self.text} and {other.text}", (*self.options, *other.options), other.request)


def devices_text(request: Request) -> str:
    """The devices of a request for people, such as "two H100"."""
    count, name = request.layout.devices, request.name
    name = name.upper() if name in DEVICES else name
    return f"{NUMBERS.get(count, count)} {name.replace('device of', 'devices of') if count > 1 else name}"


def mesh_option(layout: "Layout") -> tuple[str, ...]:
    """The option that gives a mesh; nothing for one device."""
    sizes = {name: getattr(layout, name) for name in ("data", "expert", "tensor")}
    mesh = ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    return ("--mesh", mesh) if mesh else ()


def on_more_devices(request: Request) -> Change | None:
    """The smallest number of devices that fits: a power of two more along the tensor axis, else the data axis."""
    if request.device.platform == "cpu":
        return None
    factor = 2
    while request.layout.devices * factor <= LIMIT:
        for axis in ("tensor", "data"):
            layout = replace(request.layout, **{axis: getattr(request.layout, axis) * factor})
            changed = replace(request, layout=layout)
            if changed.fits():
                return Change(devices_text(changed), mesh_option(layout), changed)
        factor *= 2
    return None


def _change(request: Request, *options: str, text: str | None = None, **fields) -> Change:
    return Change(text or " ".join(options), options, replace(request, **fields))


def in_eight_bits(request: Request) -> Change | None:
    """FP8 for the target's large matrices; None where they are in few bits."""
    if has_few_bits(request.quantize, request.shapes.forms):
        return None
    return _change(request, "--quantize", "fp8", text="FP8", quantize="fp8")


def with_fp8_caches(request: Request) -> Change | None:
    """Keys and values in FP8; None where they are."""
    if request.has_fp8_caches:
        return None
    return _change(request, "--kv-cache-dtype", "fp8", has_fp8_caches=True)


def in_four_bits(request: Request) -> Change | None:
    """NVFP4 for the target's large matrices; None where FP8 fits, or they are in few bits.

    What ``--quantize`` made of eight bits counts as whole.
    """
    eight = in_eight_bits(request)
    if eight.request.fits() if eight else request.quantize not in ("int8", "fp8"):
        return None
    return _change(request, "--quantize", "nvfp4", text="NVFP4", quantize="nvfp4")


def in_bfloat16(request: Request) -> Change | None:
    """bfloat16 for the weights; None where they are in bfloat16."""
    import jax.numpy as jnp

    if request.dtype == jnp.bfloat16:
        return None
    return _change(request, "--dtype", "bfloat16", text="bfloat16", dtype=jnp.bfloat16)


def without_drafter(request: Request) -> Change | None:
    """Plain decoding."""
    shapes = replace(request.shapes, draft=None)
    return None if shapes == request.shapes else _change(request, "--draft", "none", shapes=shapes)


def without_vision(request: Request) -> Change | None:
    """Text only; None where the target has no vision tower, or it is left out."""
    if request.shapes.target.vision is None or request.shapes.language_model_only:
        return None
    return _change(request, "--language-model-only", shapes=replace(request.shapes, language_model_only=True))


def shorter(request: Request) -> Change | None:
    """The longest slots that fit, as a multiple of 1,024 tokens."""
    longest = request.plan()["max_len"] // 1024 * 1024
    return _change(request, "--max-len", str(longest), max_len=longest) if 0 < longest < request.max_len else None


def fewer_slots(request: Request) -> Change | None:
    """The most slots that fit."""
    slots = request.plan()["max_slots"]
    return _change(request, "--slots", str(slots), slots=slots) if 0 < slots < request.slots else None


def on_larger_device(request: Request) -> Change | None:
    """The smallest listed device with more memory that fits, as many of it as before."""
    for name, device in sorted(DEVICES.items(), key=lambda item: item[1].memory):
        changed = replace(request, device=device, name=name)
        if device.memory > request.device.memory and changed.fits():
            return Change(devices_text(changed), ("--device", name, *mesh_option(request.layout)), changed)
    return None


def changes(request: Request) -> list[Change]:
    """Changes, each of which makes a request fit that does not.

    Single changes come first. Where none of the system fits, eight bits, then no drafter besides, are combined with
    another one, then more devices with fewer slots, then these without a vision tower. A larger device comes last.
    """
    fitting, combined = list(_single(request)), None
    for first in (in_bfloat16, in_eight_bits, without_drafter):
        if fitting or (change := first(combined.request if combined else request)) is None:
            continue
        combined = combined.then(change) if combined else change
        fitting += [combined] if combined.request.fits() else []
        fitting += map(combined.then, _single(combined.request))
    if not fitting and (change := _more_devices_and_fewer_slots(request)):
        fitting.append(change)
    if not fitting and (text_only := without_vision(request)):
        change = _more_devices_and_fewer_slots(text_only.request)
        fitting += [replace(change.then(text_only), request=change.request)] if change else []
    larger = on_larger_device(request)
    return [*fitting, larger] if larger else fitting


def _more_devices_and_fewer_slots(request: Request) -> Change | None:
    """The fewest devices that hold a slot, and the most slots that fit on them."""
    if not (more := on_more_devices(replace(request, slots=1))):
        return None
    fewer = fewer_slots(replace(request, layout=more.request.layout))
    if fewer is None or not fewer.request.fits():
        return None
    return more.then(fewer)


def _single(request: Request) -> Iterator[Change]:
    """The single changes of the system, and of the number of devices, that fit."""
    smaller = in_bfloat16, in_eight_bits, in_four_bits, shorter, fewer_slots, with_fp8_caches
    for change in (on_more_devices, *smaller, without_drafter, without_vision):
        changed = change(request)
        if changed is not None and changed.request.fits():
            yield changed
