"""Makes the saved data sets in this folder, with `datasets==5.2.0` in a separate environment. Nothing imports it.

python tests/unit/shared/saved_dataset/make.py tests/unit/shared/saved_dataset
"""

from __future__ import annotations

import sys
from pathlib import Path

import datasets

folder = Path(sys.argv[1])
rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a), "id": a} for a in range(10)]
every = datasets.Dataset.from_list(rows)
# After a shuffle and a selection, the library keeps an index of rows, which saving must apply.
train = every.select([3, 1, 2]).shuffle(seed=1)
datasets.DatasetDict({"train": train, "test": every.select(range(5, 7))}).save_to_disk(folder / "splits")
chat = [
    {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"},
    {
        "prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x", "name": "bob"}],
        "answer": None,
    },
]
datasets.Dataset.from_list(chat).save_to_disk(folder / "chat", num_shards=2)
