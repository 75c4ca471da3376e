"""Convolutions of 5 × 5 filters with fewer multiplications: Winograd's minimal filtering along an image's height.

Four neighbouring rows of output take eight rows of input. Rows and filter are polynomials; their values at eight
points, one of them infinity, are multiplied instead of the 4 · 5 pairs of coefficients, and sums of these products are
the output. Along the width and over the channels it stays a matrix product, one for each point: 8 instead of 20.
"""

import math
from fractions import Fraction
from functools import cache
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

SIZE = 5
"""Rows and columns of a filter. With 3 × 3, moving the numbers takes longer than multiplying them directly."""

TILE = 4
"""Rows of output that share their products. More of them would save more and round worse."""

POINTS = [Fraction(p) for p in ("0", "1", "-1", "2", "-2", "1/2", "-1/2")]
"""Where polynomials are evaluated, beside infinity: their powers stay small, and so does the rounding error."""

VALUES = len(POINTS) + 1

LEAST_IN, LEAST_OUT = 8, 32
"""Channels from which on it is quicker (measured with AVX2, images of 8 × 8 to 32 × 32): 1.2 to 1.6 times."""

AT_ONCE = 2 << 20
"""Bytes of factors and products at one time; they stay in a cache. Where one image or the filters alone take more, the
direct way needs less memory."""

Matrix = TypeVar("Matrix")
Rows = list[list[Fraction]]


class Transforms(NamedTuple, Generic[Matrix]):
    """`sums @ ((filters @ g) * (tiles @ d))` is the correlation of five numbers g with eight numbers d."""

    sums: Matrix
    filters: Matrix
    tiles: Matrix


def exact_transforms() -> Transforms[Rows]:
    """The matrices in fractions.

    The product of two polynomials is V⁻¹ of the products of their values, where V has the powers of the points; the
    correlation is the transpose of that. A row of V⁻ᵀ is the polynomial that vanishes at all points but one, over its
    value there. The filters are divided by that value: all that meets images and products is then a float exactly.
    """
    rest = [[q for q in POINTS if q != p] for p in POINTS]
    tiles = [*([*_vanishing(others), Fraction(0)] for others in rest), _vanishing(POINTS)]
    scales = [*(math.prod(p - q for q in others) for p, others in zip(POINTS, rest, strict=True)), 1]
    filters = [[x / scale for x in row] for row, scale in zip(_powers(SIZE), scales, strict=True)]
    return Transforms([list(row) for row in zip(*_powers(TILE), strict=True)], filters, tiles)


def _powers(count: int) -> Rows:
    """Of every point; at infinity a polynomial is its last coefficient."""
    return [*([p**j for j in range(count)] for p in POINTS), [Fraction(j == count - 1) for j in range(count)]]


def _vanishing(at: list[Fraction]) -> list[Fraction]:
    """The coefficients of the product of all x - p, from the constant on."""
    product, zero = [Fraction(1)], Fraction(0)
    for p in at:
        product = [low - p * high for low, high in zip([zero, *product], [*product, zero], strict=True)]
    return product


@cache
def _transforms() -> Transforms[Tensor]:
    floats = ([[float(x) for x in row] for row in rows] for rows in exact_transforms())
    return Transforms(*(torch.tensor(rows, dtype=torch.float32, device="cpu") for rows in floats))


def suits(layer: nn.Conv2d) -> bool:
    """Whether the layer is one that `convolve` computes, and quicker."""
    plain = (layer.kernel_size, layer.stride, layer.dilation, layer.groups) == ((SIZE, SIZE), (1, 1), (1, 1), 1)
    enough = layer.in_channels >= LEAST_IN and layer.out_channels >= LEAST_OUT
    enough = enough and 4 * VALUES * SIZE * layer.in_channels * layer.out_channels <= AT_ONCE
    return plain and enough and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def takes(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether these are images for `convolve`: of float32, on a CPU, of some size, and without gradients."""
    alike = x.dtype == layer.weight.dtype == torch.float32 and x.device.type == layer.weight.device.type == "cpu"
    if not alike or torch.is_grad_enabled() or x.ndim != 4 or x.shape[1] != layer.in_channels:
        return False
    return len(x) > 0 and min(_sides(layer, x)) > 0 and _bytes_each(layer, x) <= AT_ONCE


def convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """The layer's output, stored channels last, for images in any order in memory."""
    pieces = _share(len(x), AT_ONCE // _bytes_each(layer, x))
    some = -(-len(x) // pieces)
    output = x.new_empty(len(x), *_sides(layer, x), layer.out_channels)
    run = _Run(layer, x[:some], output[:some])
    for piece in range(pieces):
        start = min(piece * some, len(x) - some)  # the last piece may do a few images again
        run(x[start : start + some], output[start : start + some])
    return output.permute(0, 3, 1, 2)


def _sides(layer: nn.Conv2d, x: Tensor) -> tuple[int, int]:
    """Rows and columns of the output."""
    above, left = (int(p) for p in layer.padding)
    return x.shape[2] + 2 * above - SIZE + 1, x.shape[3] + 2 * left - SIZE + 1


def _bytes_each(layer: nn.Conv2d, x: Tensor) -> int:
    """Of the factors and products of one image."""
    rows, columns = _sides(layer, x)
    return 4 * VALUES * -(-rows // TILE) * columns * (SIZE * layer.in_channels + layer.out_channels)


def _share(n: int, most: int) -> int:
    """Into how many pieces of equal size, of up to `most`, n images go with the fewest places left over."""
    least = -(-n // max(1, most))
    return min(range(least, 2 * least + 1), key=lambda pieces: pieces * -(-n // pieces))


class _Run:
    """A layer with its filters transformed, and memory for some images at a time that all pieces use in turn."""

    def __init__(self, layer: nn.Conv2d, x: Tensor, y: Tensor) -> None:
        (n, into, height, width), (_, rows, columns, out) = x.shape, y.shape
        above, left = (int(p) for p in layer.padding)
        tiles, row, policy = -(-rows // TILE), (width + 2 * left) * into, SIZE * into
        sums, filters, values = _transforms()
        weights = layer.weight.permute(2, 3, 1, 0).reshape(SIZE, -1)
        self._weights, self._bias = (filters @ weights).view(VALUES, policy, out), layer.bias
        # Below each image is a tile of zeros, so that those of all images follow each other at equal distances.
        padded = x.new_zeros(n, (tiles + 1) * TILE, width + 2 * left, into)
        self._inside = padded[:, above:, left:][:, :height, :width].permute(0, 3, 1, 2)
        self._tiles = padded.view(-1).unfold(0, VALUES * row, TILE * row).view(-1, VALUES, row)
        self._values = values.expand(len(self._tiles), -1, -1)
        at_points = x.new_empty(n, tiles + 1, VALUES, row)
        self._at_points = at_points.view(-1, VALUES, row)[:-1]
        self._windows = at_points[:, :tiles].unfold(3, policy, into).permute(2, 0, 1, 3, 4)
        self._factors = x.new_empty(VALUES, n * tiles * columns, policy)
        self._spread = self._factors.view(self._windows.shape)
        self._products = x.new_empty(VALUES, n * tiles * columns, out)
        self._at_one = self._products[1]  # every row has the products at the point 1 once
        self._by_tile = self._products.view(VALUES, n * tiles, -1).transpose(0, 1)
        self._sums = sums.expand(n * tiles, -1, -1)
        # Where the last tile stands out, it needs a place.
        self._whole = x.new_empty(n, tiles * TILE, columns, out) if rows % TILE else None

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self._inside.copy_(x)
        torch.bmm(self._values, self._tiles, out=self._at_points)
        self._spread.copy_(self._windows)
        torch.bmm(self._factors, self._weights, out=self._products)
        if self._bias is not None:
            self._at_one.add_(self._bias)
        whole = y if self._whole is None else self._whole
        torch.bmm(self._sums, self._by_tile, out=whole.view(len(self._sums), TILE, -1))
        if whole is not y:
            y.copy_(whole[:, : y.shape[1]])
