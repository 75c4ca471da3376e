"""Names for the tensors that this runtime passes around."""

from typing import TypeAlias

from torch import Tensor

MicroBatch: TypeAlias = tuple[Tensor, Tensor]
"""Samples that go through the model together, and their labels."""
