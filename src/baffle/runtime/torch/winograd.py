"""Convolutions of 5 × 5 filters with fewer multiplications: Winograd's minimal filtering along an image's height.

Four adjacent rows of output need eight rows of input. Rows and filter are treated as polynomials. Their values at eight
points, one of them infinity, are multiplied instead of the 4 · 5 pairs of coefficients, and the output is a sum of
these products. Along the width and over the channels it remains a matrix product, one for each point: 8 instead of 20.
"""

import math
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor, nn

SIZE = 5  # rows and columns of a filter. For 3 × 3, moving the numbers takes longer than multiplying them directly.

TILE = 4  # rows of output that share their products. More rows would save more multiplications, but round worse.

POINTS = [Fraction(p) for p in ("0", "1", "-1", "2", "-2", "1/2", "-1/2")]
"""Where polynomials are evaluated, beside infinity. Small powers keep the rounding error small."""

VALUES = len(POINTS) + 1

LEAST_IN, LEAST_OUT = 8, 32
"""From this many channels on, it is faster: 1.2 to 1.6 times (measured with AVX2, images of 8 × 8 to 32 × 32)."""

AT_ONCE = 2 << 20
"""Bytes of factors and products at one time: few enough to stay in cache. If a single image or the filters alone take
more, the direct convolution needs less memory and is used instead."""

Rows = list[list[Fraction]]


def exact_transforms() -> tuple[Rows, Rows, Rows]:
    """Matrices in fractions: `sums @ ((filters @ g) * (tiles @ d))` is the correlation of five numbers g with eight d.

    The product of two polynomials is V⁻¹ times the products of their values, where V holds the powers of the points;
    the correlation is the transpose of that. A row of V⁻ᵀ is the polynomial that vanishes at all points but one,
    divided by its value there. The filters are divided instead, so that the other two matrices are exact in float32."""
    rest = [[q for q in POINTS if q != p] for p in POINTS]
    tiles = [*([*_vanishing(others), Fraction(0)] for others in rest), _vanishing(POINTS)]
    scales = [*(math.prod(p - q for q in others) for p, others in zip(POINTS, rest, strict=True)), 1]
    filters = [[x / scale for x in row] for row, scale in zip(_powers(SIZE), scales, strict=True)]
    return [list(row) for row in zip(*_powers(TILE), strict=True)], filters, tiles


def _powers(count: int) -> Rows:
    """The powers of every point. At infinity, a polynomial's value is its last coefficient."""
    return [*([p**j for j in range(count)] for p in POINTS), [Fraction(j == count - 1) for j in range(count)]]


def _vanishing(at: list[Fraction]) -> list[Fraction]:
    """The coefficients of the product of all x - p, starting with the constant."""
    product = [Fraction(1)]
    zero = Fraction(0)
    for p in at:
        product = [low - p * high for low, high in zip([zero, *product], [*product, zero], strict=True)]
    return product


@cache
def _transforms() -> list[Tensor]:
    floats = ([[float(x) for x in row] for row in rows] for rows in exact_transforms())
    return [torch.tensor(rows, dtype=torch.float32, device="cpu") for rows in floats]


def suits(layer: nn.Conv2d) -> bool:
    """Whether `convolve` can compute this layer, and is faster."""
    plain = (layer.kernel_size, layer.stride, layer.dilation, layer.groups) == ((SIZE, SIZE), (1, 1), (1, 1), 1)
    enough = layer.in_channels >= LEAST_IN and layer.out_channels >= LEAST_OUT
    enough = enough and 4 * VALUES * SIZE * layer.in_channels * layer.out_channels <= AT_ONCE
    return plain and enough and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def takes(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether `convolve` can take these images: float32 on a CPU, not empty, not too large, and without gradients."""
    alike = x.dtype == layer.weight.dtype == torch.float32 and x.device.type == layer.weight.device.type == "cpu"
    if not alike or torch.is_grad_enabled() or x.ndim != 4 or x.shape[1] != layer.in_channels:
        return False
    return len(x) > 0 and min(_sides(layer, x)) > 0 and _bytes_each(layer, x) <= AT_ONCE


def convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """The layer's output, stored channels last, for images in any memory layout."""
    # The number of equal pieces that leaves the fewest places empty.
    least = -(-len(x) // max(1, AT_ONCE // _bytes_each(layer, x)))
    pieces = min(range(least, 2 * least + 1), key=lambda pieces: pieces * -(-len(x) // pieces))
    size = -(-len(x) // pieces)
    output = x.new_empty(len(x), *_sides(layer, x), layer.out_channels)
    run = _Run(layer, x[:size], output[:size])
    for piece in range(pieces):
        start = min(piece * size, len(x) - size)  # the last piece may repeat a few images
        run(x[start : start + size], output[start : start + size])
    return output.permute(0, 3, 1, 2)


def _sides(layer: nn.Conv2d, x: Tensor) -> tuple[int, int]:
    """Rows and columns of the output."""
    above, left = (int(p) for p in layer.padding)
    return x.shape[2] + 2 * above - SIZE + 1, x.shape[3] + 2 * left - SIZE + 1


def _bytes_each(layer: nn.Conv2d, x: Tensor) -> int:
    """Bytes of the factors and products of one image."""
    rows, columns = _sides(layer, x)
    return 4 * VALUES * -(-rows // TILE) * columns * (SIZE * layer.in_channels + layer.out_channels)


class _Run:
    """A layer with its filters transformed, and memory for one piece of images, which all pieces use in turn."""

    def __init__(self, layer: nn.Conv2d, x: Tensor, y: Tensor) -> None:
        (n, into, height, width), (_, rows, columns, out) = x.shape, y.shape
        above, left = (int(p) for p in layer.padding)
        tiles = -(-rows // TILE)
        row = (width + 2 * left) * into
        terms = SIZE * into
        sums, filters, values = _transforms()
        weights = layer.weight.permute(2, 3, 1, 0).reshape(SIZE, -1)
        self._weights = (filters @ weights).view(VALUES, terms, out)
        self._bias = layer.bias
        # A tile of zeros below each image puts the tiles of all images at equal distances.
        padded = x.new_zeros(n, (tiles + 1) * TILE, width + 2 * left, into)
        self._inside = padded[:, above:, left:][:, :height, :width].permute(0, 3, 1, 2)
        self._tiles = padded.view(-1).unfold(0, VALUES * row, TILE * row).view(-1, VALUES, row)
        self._values = values.expand(len(self._tiles), -1, -1)
        at_points = x.new_empty(n, tiles + 1, VALUES, row)
        self._at_points = at_points.view(-1, VALUES, row)[:-1]
        self._windows = at_points[:, :tiles].unfold(3, terms, into).permute(2, 0, 1, 3, 4)
        self._factors = x.new_empty(VALUES, n * tiles * columns, terms)
        self._spread = self._factors.view(self._windows.shape)
        self._products = x.new_empty(VALUES, n * tiles * columns, out)
        self._at_one = self._products[1]  # each output row contains the products at the point 1 exactly once
        self._by_tile = self._products.view(VALUES, n * tiles, -1).transpose(0, 1)
        self._sums = sums.expand(n * tiles, -1, -1)
        # If the last tile reaches beyond the output, whole tiles need memory of their own.
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
