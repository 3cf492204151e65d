"""Dataset sources: open a source by its name and read its rows one at a time. It does not import torch.

A row that the rollout could not prompt with is an error, and no file is held in memory as a whole.
"""

from shared.data.open import FORMS, open_source
from shared.data.source import DataError, Row, RowError, Source, SourceLost

__all__ = ["FORMS", "DataError", "Row", "RowError", "Source", "SourceLost", "open_source"]
