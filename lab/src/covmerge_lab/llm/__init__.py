"""Suites of small language models and generative tasks, each answered in a few tokens."""

from covmerge_lab.llm.gpt2 import Gpt2Suite
from covmerge_lab.llm.suite import LlmSuite

__all__ = ["Gpt2Suite", "LlmSuite"]
