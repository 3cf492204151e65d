"""Lists all mutations."""

from __future__ import annotations

from tests.mutants.bus import BUS
from tests.mutants.hosts import HOSTS
from tests.mutants.launch import LAUNCHER
from tests.mutants.mutation import Mutation
from tests.mutants.observing import OBSERVING
from tests.mutants.rollout import ROLLOUT
from tests.mutants.samples import SAMPLES
from tests.mutants.scheduler import SCHEDULER
from tests.mutants.simulated import SIMULATED
from tests.mutants.store import STORE
from tests.mutants.trainer import TRAINER
from tests.mutants.views import VIEWS
from tests.mutants.warned import WARNED
from tests.mutants.web import WEB

MUTATIONS: list[Mutation] = [
    *SCHEDULER, *STORE, *BUS, *TRAINER, *ROLLOUT, *LAUNCHER, *HOSTS, *OBSERVING, *SAMPLES, *SIMULATED, *VIEWS, *WARNED,
    *WEB,
]  # fmt: skip
