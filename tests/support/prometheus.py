"""A strict reader of Prometheus' text format (version 0.0.4). It refuses what Prometheus refuses or advises against."""

import re
from dataclasses import dataclass, field

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(
    rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? ([+-]?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|NaN|[+-]Inf)"
)

Labels = frozenset[tuple[str, str]]


@dataclass
class Family:
    """All samples of one metric, by their labels."""

    help: str
    kind: str
    samples: dict[Labels, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The value of a metric without labels."""
        (value,) = self.samples.values()
        assert not next(iter(self.samples))
        return value


def parse(text: str) -> dict[str, Family]:
    """The metrics of a page, by name. A metric's HELP, its TYPE and its samples follow one another."""
    assert text.endswith("\n"), "the last line must end too"
    families: dict[str, Family] = {}
    lines = iter(text.removesuffix("\n").split("\n"))
    for line in lines:
        if begun := re.fullmatch(rf"# HELP ({NAME}) (\S.*)", line):
            name = begun[1]
            assert name not in families, f"{name} comes twice"
            kind = re.fullmatch(rf"# TYPE {name} (gauge|counter)", next(lines))
            assert kind, f"{name} has no type"
            assert (kind[1] == "counter") == name.endswith("_total"), f"{name} is a {kind[1]}"
            families[name] = Family(begun[2], kind[1])
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, f"not a sample: {line!r}"
        assert families, f"a sample without HELP and TYPE: {line!r}"
        assert sample[1] == list(families)[-1], f"{line!r} stands among the samples of another metric"
        labels = _labels(sample[2] or "")
        samples = families[sample[1]].samples
        assert labels not in samples, f"{line!r} comes twice"
        samples[labels] = float(sample[3])
    assert all(family.samples for family in families.values())
    return families


def _labels(text: str) -> Labels:
    pairs = [pair.split("=", 1) for pair in re.findall(LABEL, text)]
    assert len({name for name, _ in pairs}) == len(pairs), f"a label twice: {text!r}"
    plain = {"n": "\n"}
    return frozenset(
        (name, re.sub(r"\\(.)", lambda found: plain.get(found[1], found[1]), value[1:-1])) for name, value in pairs
    )
