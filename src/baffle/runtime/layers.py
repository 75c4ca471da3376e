"""The layers of a model as slices of its flat weight vector. A layer is what one module owns itself, usually a weight
and a bias."""

from collections.abc import Iterable

from baffle.core.directions import Support


def layer_of(name: str) -> str:
    """The layer that a tensor's name speaks of: "block.conv.bias" is of "block.conv". A tensor without such a prefix is
    a layer of its own."""
    return name.rpartition(".")[0] or name


def layers_of(tensors: Iterable[tuple[str, int]]) -> tuple[Support, ...]:
    """The slices of each layer, given the layer and the size of every tensor in the order of the flat vector. A support
    has two slices at most, so if the tensors of a layer lie in more places, each place is a layer of its own."""
    places = dict[str, list[tuple[int, int]]]()
    end = 0
    for layer, size in tensors:
        start, end = end, end + size
        if not size:
            continue
        own = places.setdefault(layer, [])
        if own and own[-1][1] == start:
            own[-1] = (own[-1][0], end)
        else:
            own.append((start, end))
    layers = list[Support]()
    for own in places.values():
        if len(own) == 2:
            layers.append(Support(*own[0], own[1]))
        else:
            layers += [Support(start, stop) for start, stop in own]
    return tuple(sorted(layers))
