"""Modules for tests, without a class each."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Made(nn.Module):
    """Parts by name, and what they compute. A tensor becomes a parameter."""

    def __init__(self, compute: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *x: Tensor, **named: Tensor) -> Tensor:
        output: Tensor = self.compute(self, *x, **named)
        return output
