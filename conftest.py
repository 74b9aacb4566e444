"""What all tests share, those in docstrings too."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither find nor leave anything in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COVMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
