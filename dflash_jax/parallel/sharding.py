"""The mesh, the one table of what is cut over which of its axes, and the collectives over a cut.

A step runs inside one ``jax.shard_map`` over the whole mesh: modules and states are written for the shard that a
device holds, and say where sums over devices are due. Without a mesh every cut is empty and every collective the
identity, so that the same functions run under a plain ``jax.jit``.

Axes: ``data`` (rows), ``tensor`` (heads, features, vocabulary), ``expert`` (experts; everything else is cut over it
like over ``tensor``). The last two are laid out as their prime factors (tensor=8 is tensor0 × tensor1 × tensor2, each
of 2), and a dimension is cut over as many leading factors as divide it: two KV heads on eight devices are in two
halves of four copies each. With ``decode_context_parallel`` such copies are none: the positions of each page of keys
and values are cut over the factors that are left (decode context parallelism, as vLLM and SGLang call it).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding

from dflash_jax.argument_checks import shown
from dflash_jax.errors import InputError

Axes = tuple[str, ...]
DATA = "data"


@dataclass(frozen=True)
class AxisSharding:
    """How one dimension is cut over mesh axes, and the collectives that join its parts again.

    Attributes:
        axes: The mesh axes; empty for a dimension that is not cut.
    """

    axes: Axes = ()

    def size(self) -> int:
        """Number of parts, inside the step."""
        return jax.lax.axis_size(self.axes) if self.axes else 1

    def index(self) -> int | jax.Array:
        """Index of this device's part."""
        return jax.lax.axis_index(self.axes) if self.axes else 0

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of x over the devices that share the dimension."""
        return jax.lax.psum(x, self.axes) if self.axes else x

    def max(self, x: jax.Array) -> jax.Array:
        """The maximum of x over the devices that share the dimension."""
        return jax.lax.pmax(x, self.axes) if self.axes else x

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """All parts of x, concatenated along ``axis``."""
        return jax.lax.all_gather(x, self.axes, axis=axis % x.ndim, tiled=True) if self.axes else x

    def exchange(self, x: jax.Array, axis: int) -> jax.Array:
        """What all devices have for this one: each sends part i of ``axis`` to device i.

        Args:
            x: [..., parts, ...].
            axis: The axis of the parts, which goes.

        Returns:
            [parts, ...]: the sender's index comes first.
        """
        return jax.lax.all_to_all(x, self.axes, axis, 0) if self.axes else jnp.moveaxis(x, axis, 0)

    def argmax(self, x: jax.Array, argmax: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The largest value over the last axis.

        Args:
            x: [..., part].
            argmax: Arg-max over the last axis of an array on one device.

        Returns:
            Its index in the undivided dimension, int [...], and the value, [...]. Of equal values the lowest index;
            where there is a NaN, the first NaN.
        """
        best = argmax(x)
        value = jnp.take_along_axis(x, best[..., None], axis=-1)
        if not self.axes:
            return best, value[..., 0]
        values = self.gather(value, -1)
        ids = self.gather((best + self.index() * x.shape[-1])[..., None], -1)
        first = jnp.argmax(values, axis=-1)[..., None]
        ids, values = (jnp.take_along_axis(each, first, axis=-1)[..., 0] for each in (ids, values))
        return ids, values

    def top_k(
        self, x: jax.Array, k: int, top_k: Callable[..., tuple[jax.Array, jax.Array]]
    ) -> tuple[jax.Array, jax.Array]:
        """The largest values over the last axis, the largest first; of equal ones the lowest index.

        Args:
            x: [..., part].
            k: Their number; at most all are given.
            top_k: The same of an array on one device: ``top_k(x, k=k)``.

        Returns:
            The values, [..., k], and their indices in the undivided dimension, int [..., k].
        """
        values, ids = top_k(x, k=min(k, x.shape[-1]))
        if not self.axes:
            return values, ids
        values, ids = self.gather(values, -1), self.gather(ids + self.index() * x.shape[-1], -1)
        values, order = jax.lax.top_k(values, min(k, values.shape[-1]))
        return values, jnp.take_along_axis(ids, order, axis=-1)

    def local(self, ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Indices of the undivided dimension in this device's part.

        Args:
            ids: int [...].
            size: Size of the part.

        Returns:
            Indices in the part, int [...], and whether they are inside, bool [...].
        """
        if not self.axes:
            return ids, jnp.ones(ids.shape, bool)
        local = ids - self.index() * size
        return local, (local >= 0) & (local < size)


UNSHARDED = AxisSharding()


def factors(n: int) -> list[int]:
    """Prime factors, small ones first."""
    factors_so_far, p = [], 2
    while n > 1:
        while n % p == 0:
            factors_so_far.append(p)
            n //= p
        p += 1
    return factors_so_far


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh, and over which axes each kind of dimension is cut.

    Attributes:
        data: Number of shards of the batch.
        expert: Devices among which experts are divided.
        tensor: Devices among which heads and features are divided.
        decode_context_parallel: Devices among which the positions of a page of keys and values are divided at most, of
            those that have the same KV heads.
    """

    data: int = 1
    expert: int = 1
    tensor: int = 1
    decode_context_parallel: int = 1

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """A layout from text such as ``data=2,tensor=4``.

        Raises:
            InputError: An axis is unknown, is given twice, or has no size.
        """
        sizes: dict[str, int] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, size = part.partition("=")
            if name not in ("data", "expert", "tensor"):
                raise InputError(f"mesh axis {shown(name)} is not known: axes are data, expert and tensor")
            if name in sizes:
                raise InputError(f"mesh {shown(text)} gives {name} twice")
            # int() reads at most 4,300 digits.
            if not size.isdecimal() or len(size) > 18 or int(size) < 1:
                raise InputError(f"mesh axis {name} has size {shown(size)}: it must be a whole number from 1")
            sizes[name] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        return f"data={self.data},expert={self.expert},tensor={self.tensor}"

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.expert * self.tensor

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis → size."""
        named = {DATA: self.data}
        for kind in ("tensor", "expert"):
            named |= {f"{kind}{i}": p for i, p in enumerate(factors(getattr(self, kind)))}
        return named

    def mesh(self, devices=None) -> Mesh:
        """A mesh over ``devices``, by default the first of this machine's.

        Raises:
            InputError: There are too few devices.
        """
        devices = jax.devices() if devices is None else list(devices)
        if len(devices) < self.devices:
            raise InputError(f"mesh {self} needs {self.devices} devices: there are {len(devices)}")
        kinds = (jax.sharding.AxisType.Auto,) * len(self.sizes)
        names, shape = tuple(self.sizes), tuple(self.sizes.values())
        return jax.make_mesh(shape, names, axis_types=kinds, devices=devices[: self.devices])

    def _prefix(self, size: int, *kinds: str) -> Axes:
        """The longest run of the kinds' axes, from the first on, whose sizes' product divides ``size``."""
        axes: list[str] = []
        for name, n in self.sizes.items():
            if name.rstrip("0123456789") in kinds:
                if size % n:
                    break
                size //= n
                axes.append(name)
        return tuple(axes)

    def parts(self, cut: AxisSharding) -> int:
        """Number of parts of a cut dimension."""
        return math.prod(self.sizes[a] for a in cut.axes)

    # The table.

    def wide(self, size: int) -> AxisSharding:
        """Vocabulary, features of an MLP, KV heads, key heads of Gated DeltaNet: over all devices of a data shard."""
        return AxisSharding(self._prefix(size, "tensor", "expert"))

    def heads(self, heads: int, kv_heads: int) -> AxisSharding:
        """Query heads. Further than the KV heads only where a device then has heads of one KV head."""
        kv = self.wide(kv_heads)
        return self.wide(heads) if self.parts(kv) == kv_heads else kv

    def positions(self, heads: int, kv_heads: int) -> AxisSharding:
        """Positions of a page: over devices that have the same KV head and query heads of their own."""
        axes, parts = [], 1
        for axis in self.heads(heads, kv_heads).axes[len(self.wide(kv_heads).axes) :]:
            parts *= self.sizes[axis]
            if self.decode_context_parallel % parts:
                break
            axes.append(axis)
        return AxisSharding(tuple(axes))

    def check_positions(self, heads: int, kv_heads: int) -> None:
        """Raises InputError where pages cannot be divided as ``decode_context_parallel`` says."""
        wanted, possible = self.decode_context_parallel, [1]
        for axis in self.heads(heads, kv_heads).axes[len(self.wide(kv_heads).axes) :]:
            # Pages have a power of two of positions.
            if self.sizes[axis] != 2:
                break
            possible.append(2 * possible[-1])
        if wanted not in possible:
            right = " or ".join(filter(None, (", ".join(map(str, possible[:-1])), str(possible[-1]))))
            shared = f"{possible[-1]} devices share" if len(possible) > 1 else "no two devices share"
            raise InputError(
                f"decode_context_parallel_size is {wanted}: it must be {right}, since on mesh {self} {shared} one of "
                f"the {kv_heads} KV heads and divide its query heads"
            )

    def experts(self, experts: int) -> AxisSharding:
        """Experts of a mixture.

        Raises:
            InputError: They cannot be divided among the devices.
        """
        cut = AxisSharding(self._prefix(experts, "expert"))
        if self.parts(cut) != self.expert:
            raise InputError(f"{experts} experts cannot be divided among expert={self.expert} devices")
        return cut

    def expert_features(self, size: int) -> AxisSharding:
        """Features inside an expert."""
        return AxisSharding(self._prefix(size, "tensor"))


ONE_DEVICE = Layout()


def parameter_paths(module, is_leaf: Callable | None = None) -> list[str]:
    """Dotted names of a module's parameters, in the order of its leaves."""
    paths, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf)
    names = []
    for path, _ in paths:
        parts = [str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", None)))) for key in path]
        names.append(".".join(p for p in parts if p != "value"))
    return names


def spec(*cuts: AxisSharding | str | None) -> PartitionSpec:
    """Leading dimensions' cuts (None: whole) → PartitionSpec."""
    return PartitionSpec(*(c.axes or None if isinstance(c, AxisSharding) else c for c in cuts))


def parts_of(sizes: Mapping[str, int], spec: PartitionSpec, dimension: int | None = None) -> int:
    """Number of parts into which a PartitionSpec cuts an array, or one dimension of it.

    Args:
        sizes: Mesh axis → size, of a `Layout` or of a mesh (``mesh.shape``).
        spec: The PartitionSpec.
        dimension: The dimension; None: all of them.
    """
    cuts = tuple(spec) if dimension is None else tuple(spec)[dimension : dimension + 1]
    # JAX stores a tuple of one axis as that axis's name.
    axes = [axis for cut in cuts if cut for axis in ((cut,) if isinstance(cut, str) else cut)]
    return math.prod(sizes[axis] for axis in axes)


def _child(owner: Any, name: str) -> Any:
    """A part of a tree by its name in `parameter_paths`; None where that does not lead to it."""
    if isinstance(owner, Mapping):
        return owner.get(name)
    if name.isdecimal() and hasattr(owner, "__getitem__"):
        return owner[int(name)]
    return getattr(owner, name, None)


def parameter_attribute(module, what: str, default, is_leaf: Callable | None = None):
    """An attribute of each parameter, in the order of the leaves.

    Args:
        module: The module.
        what: A method of the parts that own parameters; it returns a table from parameter to attribute.
        default: The attribute of a parameter that no table has.
        is_leaf: As for `jax.tree.leaves`.
    """
    attributes = []
    for path in parameter_paths(module, is_leaf):
        owner, name = module, path.split(".")
        while len(name) > 1 and not (hasattr(owner, what) and name[0] in getattr(owner, what)()):
            owner, name = _child(owner, name[0]), name[1:]
        table = getattr(owner, what)() if hasattr(owner, what) else {}
        attributes.append(table.get(name[0], default))
    return attributes


def parameter_specs(module, is_leaf: Callable | None = None) -> list[PartitionSpec]:
    """The PartitionSpec of each parameter, in the order of the leaves, which ``is_leaf`` is for.

    A part that cuts its parameters has ``shardings()``: a table from parameter to the cuts of its dimensions.
    """
    return [spec(*cuts) for cuts in parameter_attribute(module, "shardings", (), is_leaf)]


def place(array: Any, sharding: Sharding) -> jax.Array:
    """A copy of an array on the mesh, each device (of several hosts) given its part only.

    Args:
        array: A NumPy array, or what has a shape and a dtype and gives parts by an index, each of which is asked once;
            or an array of JAX on whatever devices, which goes from device to device.
        sharding: Its sharding.
    """
    if isinstance(array, jax.Array):
        return jax.device_put(array, sharding, may_alias=False)
    parts: dict[tuple, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        key = tuple((s.start, s.stop) for s in index)
        if key not in parts:
            parts[key] = array[index]
        return parts[key]

    return jax.make_array_from_callback(array.shape, sharding, part)
