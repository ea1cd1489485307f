"""Accelerators by name: memory and bandwidth, for plans and for choosing a system's mesh."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """``memory`` in bytes, ``bandwidth`` in bytes per second, as the maker states them; ``kind``: how JAX's
    device_kind begins."""

    kind: str
    memory: int
    bandwidth: float

    @property
    def platform(self) -> str:
        """As `jax.default_backend` has it."""
        return "tpu" if self.kind.startswith("TPU") else "gpu"


DEVICES = {
    "b200": Device("NVIDIA B200", 191_514_411_008, 8.0e12),
    "h200": Device("NVIDIA H200", 151_397_597_184, 4.8e12),
    "h100": Device("NVIDIA H100", 84_942_979_072, 3.35e12),
    "v6e": Device("TPU v6 lite", 32 * 2**30, 1.638e12),
    "v5e": Device("TPU v5 lite", 16 * 2**30, 0.819e12),
    "v5p": Device("TPU v5p", 95 * 2**30, 2.765e12),
}


def device_name(kind: str) -> str | None:
    """The name here of a JAX device_kind."""
    return next((name for name, device in DEVICES.items() if kind.startswith(device.kind)), None)
