"""Opens dataset sources by name and reads their rows one at a time. The package does not import torch.

A row that the rollout could not use as a prompt is an error. Files are read in parts, Parquet files by row group.
"""

from shared.data.open import FORMS, open_source
from shared.data.source import DataError, Row, RowError, Source, SourceChanged, SourceLost

__all__ = ["FORMS", "DataError", "Row", "RowError", "Source", "SourceChanged", "SourceLost", "open_source"]
