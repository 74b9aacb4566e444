"""Chat templates that cannot be read."""

import pytest

from covmerge.errors import CheckpointError
from covmerge.plan.vocabulary.files import TEMPLATE, template_of


def test_a_template_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / TEMPLATE).write_bytes(b"{{ \xff }}")
    with pytest.raises(
        CheckpointError, match=r"chat_template\.jinja is not UTF-8 .*fetch it again"
    ):
        template_of(tmp_path)
