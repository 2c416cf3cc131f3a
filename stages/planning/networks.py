"""One network on a device: its parameters, and the bytes of its weights. Standard library only."""

from dataclasses import dataclass

from stages.planning.shapes import (
    Shape,
    adapter_parameters,
    block_weights,
    policy_parameters,
    scorer_parameters,
)

FULL, HALF = 4, 2  # bytes of a float32 and of a bf16 number


@dataclass(frozen=True, kw_only=True)
class Network:
    """One network on the device."""

    shape: Shape
    scalar: bool = False
    """A reward model or critic, which has one output."""
    adapter: int = 0
    """Rank of its LoRA adapter; 0: none."""
    trained: bool = False
    """Whether an optimizer learns it."""
    frozen: bool = False
    """Whether its weights are marked as not to be learned: autocast keeps no copies of them."""
    each: int = FULL
    """Bytes of one of its weights."""

    @property
    def parameters(self) -> int:
        """Its own parameters, without an adapter."""
        return scorer_parameters(self.shape) if self.scalar else policy_parameters(self.shape)

    @property
    def learned(self) -> int:
        """Parameters that learn."""
        if not self.trained:
            return 0
        if not self.adapter:
            return self.parameters
        head = self.shape.hidden + 1 if self.scalar else 0
        return adapter_parameters(self.shape, self.adapter) + head

    @property
    def matrices(self) -> int:
        """Weights that a matrix product reads for every token."""
        head = 0 if self.scalar else self.shape.vocabulary * self.shape.hidden
        return self.shape.layers * block_weights(self.shape) + head

    @property
    def largest(self) -> int:
        """Parameters of its largest tensor, the embedding."""
        return self.shape.vocabulary * self.shape.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights; an adapter is held in float32."""
        added = adapter_parameters(self.shape, self.adapter) if self.adapter else 0
        return self.parameters * self.each + added * FULL

    def cast_bytes(self, recomputed: bool = False) -> int:
        """bf16 copies of its weights that live while a pass is under way.

        Autocast keeps a copy of every weight that may learn until it ends, and autograd keeps those
        that it needs. Frozen weights are cast again for each product.
        """
        if self.each == HALF:
            return 0
        kept = not self.adapter or (self.trained and not recomputed)
        if kept and not self.frozen:
            return HALF * self.matrices
        output = 0 if self.scalar else self.largest
        return HALF * max(output, self.shape.hidden * self.shape.intermediate)
