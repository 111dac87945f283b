"""Where two runs part: configuration, data, then the first step, tensor and element, and what may explain it."""

from reproduce.diff.report import diff

__all__ = ["diff"]
