"""The digits in four looks: a data set with domains that needs no files."""

from baffle.paper.looks import LOOKS, digits_in_four_looks


def test_the_digits_in_four_looks_differ_by_domain() -> None:
    source = digits_in_four_looks()
    assert source.domains == LOOKS
    for part in (source.train, source.test):
        assert part.domain_of is not None
        assert set(part.domain_of.tolist()) == {0, 1, 2, 3}
    assert source.shape == (3, 32, 32)
