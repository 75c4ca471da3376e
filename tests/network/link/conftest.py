"""Keys that all tests of the link share."""

import pytest

from tests.support.links import Keys, new_keys


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """The keys of a server and five clients."""
    return new_keys(tmp_path_factory.mktemp("link") / "keys", 5)
