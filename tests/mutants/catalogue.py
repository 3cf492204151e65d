"""Lists all mutations."""

from __future__ import annotations

from tests.mutants.bus import BUS
from tests.mutants.hosts import HOSTS
from tests.mutants.mutation import Mutation
from tests.mutants.rollout import ROLLOUT
from tests.mutants.scheduler import SCHEDULER
from tests.mutants.simulated import SIMULATED
from tests.mutants.store import STORE
from tests.mutants.trainer import TRAINER

MUTATIONS: list[Mutation] = [*SCHEDULER, *STORE, *BUS, *TRAINER, *ROLLOUT, *HOSTS, *SIMULATED]
