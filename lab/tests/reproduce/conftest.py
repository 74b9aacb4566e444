import pytest


@pytest.fixture
def prepared(monkeypatch, tmp_path_factory):
    """lm-eval, with its datasets prepared in a folder of the test's own, and no hub asked."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
