from benchmarks import overview


def test_its_table_is_of_the_committed_results():
    text = overview.README.read_text("utf-8")
    assert overview.written(text) == text, "run `python -m benchmarks.overview`"
