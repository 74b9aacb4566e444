"""The text suite: a sentence encoder and classification tasks of very different size and difficulty."""

from covmerge.evaluation.text.suite import TextSuite

__all__ = ["TextSuite"]
