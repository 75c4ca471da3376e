"""Secrets are recovered from the shares of one slot, and whoever gave a wrong one is known by it."""

from collections.abc import Mapping

import pytest

from baffle.aggregation.server.recovery import Dealt, Recovery
from baffle.aggregation.shares import new_secret, split
from baffle.errors import AbortError

DEALER, T, HOLDERS = 2, 5, range(9)


class Secret:
    """A secret, and the shares of it that a dealer has dealt."""

    def __init__(self) -> None:
        self.secret = new_secret()
        pairs = split(self.secret, self.secret, T, [holder + 1 for holder in HOLDERS])
        self.shares = {holder: first for holder, (first, _) in zip(HOLDERS, pairs, strict=True)}
        self.dealt = Dealt(DEALER, self.secret.__eq__, lambda holder, share: share == self.shares[holder])

    def with_wrong(self, *holders: int) -> Mapping[int, bytes]:
        return self.shares | {holder: new_secret() for holder in holders}


@pytest.mark.parametrize("same_holders", [False, True])
def test_shares_that_were_never_dealt_do_not_count(same_holders: bool) -> None:
    for wrong in ((), (0,), (8,), (0, 1, 3, 8)):
        secret, recovery = Secret(), Recovery(7, T, same_holders)
        assert recovery.secret(secret.with_wrong(*wrong), secret.dealt) == secret.secret
        if same_holders:
            how = f"in round 7 it released a share that client {DEALER} had not dealt to it"
            assert recovery.lies == dict.fromkeys(wrong, how)


def test_too_few_that_were_dealt_give_no_secret() -> None:
    secret, recovery = Secret(), Recovery(7, T, True)
    with pytest.raises(AbortError, match="4 neighbours of client 2 gave the shares they were dealt, 5 are needed"):
        recovery.secret(secret.with_wrong(0, 1, 3, 4, 5), secret.dealt)
    assert recovery.lies.keys() == {0, 1, 3, 4, 5}
    with pytest.raises(AbortError, match="4 neighbours of client 2 answered, 5 are needed"):
        recovery.secret(dict(list(secret.shares.items())[:4]), secret.dealt)


def test_a_share_that_is_not_needed_is_found_out_half_of_the_time() -> None:
    """In a large graph only a threshold of the shares is looked at, but nobody knows which."""
    caught = 0
    for _ in range(200):
        secret, recovery = Secret(), Recovery(7, T, False)
        assert recovery.secret(secret.with_wrong(8), secret.dealt) == secret.secret
        caught += bool(recovery.lies)
    assert 60 < caught < 180


@pytest.mark.parametrize("same_holders", [False, True])
def test_a_dealer_whose_shares_give_another_secret_is_named_alone(same_holders: bool) -> None:
    secret, other, recovery = Secret(), Secret(), Recovery(7, T, same_holders)
    dealt = Dealt(DEALER, secret.secret.__eq__, other.dealt.share)
    with pytest.raises(AbortError, match="client 2 dealt shares that do not give what it had committed to"):
        recovery.secret(other.shares, dealt)
    assert recovery.lies == {DEALER: "in round 7 it dealt shares that do not give what it had committed to"}


@pytest.mark.parametrize("wrong", [(0,), (DEALER,), (0, 8), (DEALER, 8)])
def test_a_few_wrong_shares_of_a_dealer_are_corrected(wrong: tuple[int, ...]) -> None:
    secret, recovery = Secret(), Recovery(7, T, True)
    shares = secret.with_wrong(*wrong)
    dealt = Dealt(DEALER, secret.secret.__eq__, lambda holder, share: share == shares[holder])
    assert recovery.secret(shares, dealt) == secret.secret
    assert recovery.lies.keys() == {DEALER}


@pytest.mark.parametrize(("complaints", "named"), [(0, False), (1, False), (4, False), (5, True), (9, True)])
def test_complaints_count_against_a_dealer_only_if_honest_holders_must_be_among_them(
    complaints: int, named: bool
) -> None:
    recovery = Recovery(7, T, True)
    recovery.note_unopened(DEALER, complaints, len(HOLDERS))
    assert recovery.lies == (
        {DEALER: f"in round 7 its boxes could not be opened by {complaints} of 9 holders"} if named else {}
    )
