"""The vision suite: a small ViT pretrained here, and tasks trained alike, as the CLIP suites' are."""

from covmerge_lab.vision.suite import VisionSuite

__all__ = ["VisionSuite"]
