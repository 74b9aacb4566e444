import pytest

from benchmarks import overview, performance


@pytest.mark.parametrize("page", overview.PAGES, ids=lambda page: page.stem)
def test_its_tables_are_of_the_committed_results(page):
    text = page.read_text("utf-8")
    assert "<!-- results" in text
    assert overview.written(text) == text, "run `python -m benchmarks.overview`"


def test_the_tables_on_performance_are_of_the_committed_results():
    text = performance.PAGE.read_text("utf-8")
    assert performance.written(text) == text, "run `python -m benchmarks.performance`"


@pytest.mark.parametrize("name", ["roofline", "growth", "timeline"])
def test_its_pictures_are_there(name):
    assert f"images/{name}.svg" in performance.PAGE.read_text("utf-8")
    assert (performance.IMAGES / f"{name}.svg").exists()
