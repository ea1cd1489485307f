"""Accelerators by name: memory and bandwidth, for plans and for choosing a system's mesh."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """``memory`` in bytes, as the driver reports it; ``bandwidth`` in bytes per second, as the maker states it;
    ``kind``: how JAX's device_kind begins."""

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
    "a100": Device("NVIDIA A100-SXM4-80GB", 81_920 * 2**20, 2.039e12),
    "l40s": Device("NVIDIA L40S", 46_068 * 2**20, 0.864e12),
    "rtx4090": Device("NVIDIA GeForce RTX 4090", 24_564 * 2**20, 1.008e12),
    "rtx5090": Device("NVIDIA GeForce RTX 5090", 32_607 * 2**20, 1.792e12),
    "rtxpro6000": Device("NVIDIA RTX PRO 6000 Blackwell", 97_887 * 2**20, 1.792e12),
    "v6e": Device("TPU v6 lite", 32 * 2**30, 1.638e12),
    "v5e": Device("TPU v5 lite", 16 * 2**30, 0.819e12),
    "v5p": Device("TPU v5p", 95 * 2**30, 2.765e12),
}


def device_name(kind: str) -> str | None:
    """The name here of a JAX device_kind."""
    return next((name for name, device in DEVICES.items() if kind.startswith(device.kind)), None)
