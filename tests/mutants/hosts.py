"""Lists defects in the launcher and in runs on several hosts: false alarms, lost hosts, placement."""

from __future__ import annotations

from tests.mutants.mutation import Mutation
from tests.mutants.promises import Promise

BOOK = "launch/placement/book.py"
SCHEDULER = "services/scheduler/state.py"
STORES = "tests/unit/scheduler/test_stores.py"
PLACES = "tests/property/test_host_book.py::test_every_process_has_exactly_one_place_whatever_happens_to_the_hosts"

HOSTS = [
    Mutation(
        "the scheduler waits indefinitely for a store that the topology places",
        Promise.DEADLINES,
        "services/scheduler/registry.py",
        "> GONE_S and holder[0] == STORE and service_name(*holder) != TRAINER_STORE",
        "> GONE_S and holder[0] == STORE and holder[1] > 1",
        f"{STORES}::test_a_silent_store_that_the_topology_places_is_declared_gone_and_its_tasks_are_sampled_again",
    ),
    Mutation(
        "a lost host's store is accepted again when it is heard from again",
        Promise.READABLE,
        SCHEDULER,
        "if request.incarnation in self._lost_lives:",
        "if request.incarnation in self._lost_lives and request.service != STORE:",
        f"{STORES}::test_a_store_that_returns_after_its_host_was_lost_is_not_registered_again",
    ),
    Mutation(
        "the processes of a lost host are not moved to another host",
        Promise.KILLED,
        BOOK,
        """        effects.append(Told(f"host {name} is lost: {cause}"))
        self._place_homeless(effects)""",
        """        effects.append(Told(f"host {name} is lost: {cause}"))""",
        PLACES,
    ),
    Mutation(
        "a damaged chunk of a version is passed on",
        Promise.SYNCED,
        "services/batch_store/relay.py",
        "if xxhash.xxh3_64_intdigest(self._view[at:end]) != self._digest(at // CHUNK_BYTES):",
        "if self._digest(at // CHUNK_BYTES) < 0:",
        "tests/unit/batch_store/test_filling_file.py::test_a_damaged_chunk_stays_unavailable_and_is_received_again",
    ),
    Mutation(
        "the log-probs of ranks on other hosts are not counted and are never removed",
        Promise.BYTES,
        "services/scheduler/shards.py",
        "for holder in self.registry.on_host(host) if holder[0] == STORE)",
        "for holder in self.registry.on_host(host) if False)",
        f"{STORES}::test_log_probs_from_ranks_on_two_hosts_are_counted_in_the_stores_of_both",
    ),
    Mutation(
        "time in which the launcher was stopped counts as silence",
        Promise.DEADLINES,
        "launch/supervisor/runner.py",
        "min(seen_at - self._seen_at, 2 * TICK_S)",
        "seen_at - self._seen_at",
        "tests/integration/launch/test_launch.py::test_slow_services_and_a_stopped_launcher_cause_no_false_alarm",
    ),
]
