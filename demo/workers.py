"""Worker processes, one a core, each with one thread: they do not wait for one another."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import transformers


def pool(jobs: int) -> ProcessPoolExecutor:
    """Start workers for so many jobs, at most one for each core."""
    return ProcessPoolExecutor(
        max_workers=min(jobs, os.cpu_count() or 1),
        mp_context=get_context("spawn"),
        initializer=prepare,
    )


def prepare() -> None:
    """Use one thread, and keep transformers from reporting every checkpoint that it loads."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
