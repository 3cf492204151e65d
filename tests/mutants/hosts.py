"""Defects of runs on several hosts: believed deaths, lost hosts, places."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

BOOK = "launch/placement/book.py"
SCHEDULER = "services/scheduler/state.py"
STORES = "tests/unit/scheduler/test_stores.py"
PLACES = "tests/property/test_host_book.py::test_every_process_has_one_place_whatever_happens_to_the_hosts"
RETURNS = "tests/unit/launch/test_host_book.py::test_a_host_that_returns_runs_what_found_no_other_place"

HOSTS = [
    Mutation(
        "a process that the supervisor did not start counts as dead",
        "launch/supervisor/server.py",
        "if (key, request.pid) in self._ended_lives:",
        "if child is None or child.pid != request.pid:",
        "tests/unit/launch/test_supervisor_server.py::test_only_the_death_of_an_own_process_is_confirmed",
    ),
    Mutation(
        "a process that nobody saw end is never over",
        SCHEDULER,
        "return known is None or known.incarnation != incarnation or seen is None or now - seen.at > GONE_S",
        "return known is None or known.incarnation != incarnation",
        f"{STORES}::test_a_process_that_nobody_saw_end_is_over_after_another_registration_or_a_long_silence",
    ),
    Mutation(
        "a store that the topology places is waited for indefinitely",
        SCHEDULER,
        "service_name(*holder) != TRAINER_STORE and self._now - seen.at > GONE_S",
        "holder[1] > 1 and self._now - seen.at > GONE_S",
        f"{STORES}::test_a_silent_store_that_the_topology_places_is_given_up_and_its_tasks_are_made_again",
    ),
    Mutation(
        "the trainer puts into the store of the first host by name",
        "shared/topology/schema.py",
        "return [self.home, *sorted({*named, *self.placement.hosts} - {self.home})]",
        'return sorted({self.home, *named, *self.placement.hosts}, key=lambda host: host or "")',
        "tests/unit/shared/topology/test_topology.py::test_the_trainers_host_has_the_store_into_which_the_trainer_puts",
    ),
    Mutation(
        "the leases of a lost host run out by themselves",
        SCHEDULER,
        "self._durable(LeaseExpired(lease.lease_id, not_started=True))",
        "continue",
        f"{STORES}::test_the_leases_of_a_lost_process_are_given_up_although_a_store_of_its_host_is_alive",
    ),
    Mutation(
        "the processes of a lost host stay there",
        BOOK,
        """        effects.append(Told(f"host {name} is lost: {cause}"))
        self._place_homeless(effects)""",
        """        effects.append(Told(f"host {name} is lost: {cause}"))""",
        PLACES,
    ),
    Mutation(
        "a process gets GPUs that another one has",
        BOOK,
        "if name == host.name and other is not unit",
        "if name != host.name and other is not unit",
        PLACES,
    ),
    Mutation(
        "a host returns with the store that was given up",
        BOOK,
        "if host.state == HostState.LOST:  # its former",
        "if host.state == HostState.ENDED:  # its former",
        RETURNS,
    ),
    Mutation(
        "an agent that was given up is taken again",
        BOOK,
        "if report.incarnation in host.given_up:",
        "if report.incarnation in host.given_up and not host.report:",
        RETURNS,
    ),
    Mutation(
        "the scheduler ends before the processes of other hosts",
        "launch/supervisor/state.py",
        "if self._hosts and DRAIN_ORDER[index] in LAST:",
        "if self._hosts and index > len(DRAIN_ORDER):",
        "tests/unit/launch/test_supervisor_hosts.py::test_what_other_hosts_talk_to_stays_until_they_have_ended",
    ),
    Mutation(
        "the access that agents wait for stays when the run is over",
        "launch/cluster.py",
        "                stack.callback(access.unlink, missing_ok=True)\n",
        "",
        "tests/integration/hosts/test_exported_access.py"
        "::test_an_agent_waits_for_the_access_that_lasts_as_long_as_the_run",
    ),
]
