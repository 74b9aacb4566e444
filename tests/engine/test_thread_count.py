"""How many threads torch computes with is each thread's own."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from covmerge.run.engine.hashing import read_files
from covmerge.run.engine.thread_count import torch_threads, use_threads


def test_a_thread_keeps_its_number_whatever_others_set_before_its_first_operation() -> None:
    both_have_set = Barrier(2, timeout=10)

    def own(count: int) -> int:
        use_threads(count)
        both_have_set.wait()
        torch.ones(8).sum()
        return torch.get_num_threads()

    with torch_threads(None), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(own, (1, 2))) == [1, 2]


def test_the_number_comes_back() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_an_output_is_looked_over_by_one_thread_a_file():
    class Check:
        def __call__(self, base, name):
            del base
            return [name, torch.get_num_threads()]

    with torch_threads(2):
        found = read_files({"a": 1, "b": 1}, Check(), None)
        assert found == {"a": ["a", 1], "b": ["b", 1]}
        assert torch.get_num_threads() == 2
