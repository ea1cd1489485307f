"""What a kernel's tiles are chosen by: the numbers of an NVIDIA card."""

from dataclasses import dataclass

KB = 1024
# Bytes of shared memory that a program may have, by compute capability (CUDA C++ Programming Guide, technical
# specifications; one KB of each is the driver's). For JAX that does not say it, and for cards that are not here.
SHARED_MEMORY = {
    80: 163 * KB, 86: 99 * KB, 87: 163 * KB, 89: 99 * KB, 90: 227 * KB, 100: 227 * KB, 103: 227 * KB, 120: 99 * KB,
    121: 99 * KB,
}  # fmt: skip
# The oldest capability with products of bfloat16, and with them of float8.
OLDEST, OLDEST_FP8 = 80, 89


@dataclass(frozen=True)
class Card:
    """An NVIDIA card, or one that a program is compiled for.

    Attributes:
        capability: Its compute capability, 10 times major plus minor: 90 is Hopper, 100 the data centre's Blackwell.
        shared_memory: Bytes that one program of a kernel may have.
    """

    capability: int
    shared_memory: int

    @classmethod
    def of_capability(cls, capability: int) -> "Card":
        """Of an unknown one: the least shared memory that a known one has."""
        return cls(capability, SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values())))

    @classmethod
    def of_device(cls, device) -> "Card":
        """Of a `jax.Device` of CUDA, or one of a topology that is compiled for."""
        card = cls.of_capability(round(10 * float(device.compute_capability)))
        return cls(card.capability, getattr(device, "shared_memory_per_block_optin", None) or card.shared_memory)

    @property
    def has_tensor_memory(self) -> bool:
        """Whether products are summed in memory of their own, 512 columns for the programs of a multiprocessor."""
        return 100 <= self.capability < 120


HOPPER = Card.of_capability(90)
