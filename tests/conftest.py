"""What every test shares: hypothesis profiles, and the rule that a GPU test needs a GPU.

It must never hold fixtures that only one test folder uses.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, settings

# Set before anything imports the hub's client: no test may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"

# Wall-clock deadlines per example fail on a busy machine for reasons that are not ours.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
# What a defect makes of an example is of no interest there, only that one is found.
settings.register_profile("mutants", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
