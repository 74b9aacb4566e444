import pytest

from tests.cli.runs import save_plain


@pytest.fixture
def models(tmp_path):
    return save_plain(tmp_path)
