"""What the tests from file to file share."""

import pytest


@pytest.fixture
def any_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers take the PEFT that is there.

    transformers 5.24.0 asks for PEFT 0.22.0, and 0.21.2 was the newest release then.
    """
    monkeypatch.setattr(
        "transformers.integrations.peft.check_peft_version", lambda min_version: None
    )
