"""What a kernel's tiles are chosen by: the numbers of an NVIDIA card."""

from dataclasses import dataclass

KIB = 1024
# Of --kernels.
CHOICES = ("auto", "xla")
# Bytes of shared memory that a program may have, by compute capability (CUDA C++ Programming Guide, technical
# specifications). Used where JAX does not report it, and for cards that are not in this machine.
SHARED_MEMORY = {
    80: 163 * KIB, 86: 99 * KIB, 87: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 103: 227 * KIB,
    120: 99 * KIB, 121: 99 * KIB,
}  # fmt: skip
# By compute capability, newest first: the oldest PTX version for it (PTX ISA, release notes; 89: for float8).
LEAST_PTX = ((121, 88), (120, 87), (103, 88), (100, 86), (90, 80), (89, 81), (80, 70))
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
    def reads_shared(self) -> bool:
        """Whether products of 64 rows and more read their operands in shared memory: Hopper's and the data centre's
        Blackwell's."""
        return 90 <= self.capability < 120

    @property
    def least_ptx(self) -> int:
        """The oldest PTX version that has the card's instructions, as 10 times major plus minor."""
        return next((version for since, version in LEAST_PTX if self.capability >= since), 70)


HOPPER = Card.of_capability(90)
