"""The text suite: a sentence encoder and classification tasks of very different size and difficulty."""

from covmerge_lab.text.suite import TextSuite

__all__ = ["TextSuite"]
