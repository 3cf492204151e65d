"""Where dataset rows come from: opens a named source, reads a row at a time. Must never import torch, hold a
whole file in memory, or return a row that the rollout could not prompt with.
"""

from shared.data.open import FORMS, open_source
from shared.data.source import DataError, Row, RowError, Source, SourceLost

__all__ = ["FORMS", "DataError", "Row", "RowError", "Source", "SourceLost", "open_source"]
