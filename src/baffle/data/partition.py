"""Partitions: which client holds which samples. Shares follow from a key by integers and correctly rounded arithmetic,
so they are the same on every machine."""

from dataclasses import dataclass

import numpy as np

from baffle.core.arrays import I64
from baffle.core.samples import PADDING, Labels
from baffle.core.seeds import Seeds, keystream, permutation
from baffle.data.sources import Source
from baffle.errors import PlanError
from baffle.plan import Plan
from baffle.plan.functions import GIVEN
from baffle.plan.tasks import is_own


def share_out(plan: Plan, source: Source) -> list[I64]:
    """Each client's samples, as indices into the training set."""
    key, train = Seeds(plan.seed, b"").key("partition"), source.train
    clients, data = plan.federation.clients, plan.task.data
    match plan.federation.partition:
        case "iid":
            return iid(key, len(train), clients)
        case "dirichlet" if source.classes and train.labels.ndim == 1:
            return dirichlet(key, train.labels, clients, plan.federation.alpha, plan.federation.floor_samples)
        case "dirichlet":
            fault = f'"dirichlet" divides classes, but {data} has no class for each sample; expected "iid"'
        case "domain" if train.domain_of is not None:
            return by_domain(key, train.domain_of, clients)
        case "domain":
            fault = _lacks(data, "domain", 'expected "pacs", "officehome"')
        case "writer" if train.writer_of is not None:
            return by_writer(key, train.writer_of, clients)
        case "writer":
            files = "qmnist-train-labels-idx2-int.gz (from github.com/facebookresearch/qmnist)"
            fault = _lacks(data, "writer", f'expected "mnist" with {files} beside its files')
    raise PlanError(f"federation.partition: {fault}")


def _lacks(data: str, group: str, expected: str) -> str:
    if data.startswith(f"{GIVEN}:"):
        return f'pairs (x, y) have no {group}s; give a list with the data of each {group}, and leave "{group}" out'
    own = f"{group}_of in the baffle.Dataset of its training samples"
    return f"{data} has no {group}s; " + (f"expected {own}" if is_own(data) else f"{expected}, or your own with {own}")


def iid(key: bytes, samples: int, clients: int) -> list[I64]:
    """Samples in random order, dealt out in shares that differ by at most one."""
    _require(clients, 1, samples)
    return np.array_split(permutation(key, samples), clients)


def dirichlet(key: bytes, labels: I64, clients: int, alpha: float, floor: int) -> list[I64]:
    """Divide each class among clients in proportions drawn from Dirichlet(alpha, …, alpha).

    Classes are dealt out one after the other. A client that already has an even share of all samples gets none of the
    next class. Clients that end below the floor get samples from the client that has the most at that time.
    """
    _require(clients, floor, len(labels))
    order = permutation(key, len(labels))
    owner = np.empty(len(labels), np.int64)
    sizes = np.zeros(clients, np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels[order] == label)
        below = np.flatnonzero(sizes * clients < len(labels))
        owner[members] = below[_urn(key, 1 + int(label), len(members), len(below), alpha)]
        sizes += np.bincount(owner[members], minlength=clients)
    for client in np.flatnonzero(sizes < floor):
        while sizes[client] < floor:
            giver = int(np.argmax(sizes))
            count = min(floor - sizes[client], sizes[giver] - floor)
            owner[np.flatnonzero(owner == giver)[-count:]] = client
            sizes[giver] -= count
            sizes[client] += count
    return _grouped(order, owner, clients)


def by_domain(key: bytes, domain_of: I64, clients: int) -> list[I64]:
    """The same number of clients for each domain, in the order of domains. They share its samples evenly."""
    domains = np.unique(domain_of)
    if clients % len(domains):
        raise PlanError(
            f"federation.clients: {clients} clients cannot be divided among {len(domains)} domains; "
            f"set it to a multiple of {len(domains)}"
        )
    order, each, shares = permutation(key, len(domain_of)), clients // len(domains), list[I64]()
    for domain in domains:
        members = order[domain_of[order] == domain]
        if each > len(members):
            raise PlanError(
                f"federation.clients: {each} clients cannot share a domain's {len(members)} samples; "
                f"set it to at most {np.unique(domain_of, return_counts=True)[1].min() * len(domains)}"
            )
        shares += np.array_split(members, each)
    return shares


def by_writer(key: bytes, writer_of: I64, clients: int) -> list[I64]:
    """One client for each writer. With fewer clients than writers, writers are drawn at random."""
    writers, person = np.unique(writer_of, return_inverse=True)
    if clients > len(writers):
        raise PlanError(
            f"federation.clients: {clients} clients, but only {len(writers)} writers; set it to at most {len(writers)}"
        )
    order = permutation(key, len(writer_of))
    shares = _grouped(order, person[order].astype(np.int64), len(writers))
    next_key = keystream(key, [1], 0, 2).tobytes()
    return [shares[writer] for writer in permutation(next_key, len(writers))[:clients]]


def class_counts(labels: Labels, shares: list[I64], classes: int) -> I64:
    """How many samples (or tokens, if these have labels) of each class (column) each client (row) holds."""
    if not classes:
        return np.zeros((len(shares), 0), np.int64)
    own = (labels[share].reshape(-1) for share in shares)
    return np.array([np.bincount(held[held != PADDING], minlength=classes) for held in own], dtype=np.int64)


def _urn(key: bytes, lane: int, count: int, clients: int, alpha: float) -> I64:
    """Owners of `count` samples, as if drawn from proportions that are themselves drawn from Dirichlet(alpha).

    Pólya's urn has the same distribution and needs no gamma variates, whose last bits differ between machines: sample i
    goes to a client drawn evenly with probability clients·alpha / (clients·alpha + i), and else to the owner of an
    earlier sample drawn evenly.
    """
    noise = keystream(key, [lane], 0, count).view("<u8").reshape(count, 2)
    place, weight = np.arange(count), min(clients * alpha, 2.0**52)  # beyond that, no sample follows an earlier one
    uniform = (noise[:, 0] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    fresh = uniform * (weight + place) < weight
    fresh[:1] = True
    anyone = (noise[:, 1] % np.uint64(clients)).astype(np.int64)
    earlier = (noise[:, 1] % np.maximum(place, 1).astype(np.uint64)).astype(np.int64)
    follows = np.where(fresh, place, earlier)
    while (follows[follows] != follows).any():
        follows = follows[follows]
    return anyone[follows]


def _grouped(order: I64, owner: I64, clients: int) -> list[I64]:
    """The samples of each owner, in the given order."""
    ends = np.cumsum(np.bincount(owner, minlength=clients))[:-1]
    return np.split(order[np.argsort(owner, kind="stable")], ends)


def _require(clients: int, floor: int, samples: int) -> None:
    if clients * floor > samples:
        of = f" of at least {floor} each" if floor > 1 else ""
        raise PlanError(
            f"federation.clients: {clients} clients cannot share {samples} samples{of}; "
            f"set it to at most {samples // floor}"
        )


@dataclass(frozen=True)
class Holding:
    """How many samples of each class a client holds; its domain or writer if all of its samples share it."""

    client: int
    samples: int
    classes: list[int]
    domain: str | None = None
    writer: int | None = None

    @property
    def group(self) -> str:
        return self.domain or ("" if self.writer is None else f"writer {self.writer}")


def holdings(source: Source, shares: list[I64]) -> list[Holding]:
    """The holding of each client, in the clients' order."""
    counts = class_counts(source.train.labels, shares, source.classes)
    held = list[Holding]()
    for client, (share, classes) in enumerate(zip(shares, counts, strict=True)):
        domain, writer = (_common(of, share) for of in (source.train.domain_of, source.train.writer_of))
        name = None if domain is None else source.domains[domain]
        held.append(Holding(client, len(share), classes.tolist(), name, writer))
    return held


def _common(group_of: I64 | None, share: I64) -> int | None:
    """The group that all samples of a client belong to; None if they belong to several."""
    if group_of is None or (group_of[share] != group_of[share[0]]).any():
        return None
    return int(group_of[share[0]])
