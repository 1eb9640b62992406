"""Sample groups: samples that belong together, on one rank if that can be."""

from .sample_groups import SampleGroups

__all__ = ["SampleGroups"]
