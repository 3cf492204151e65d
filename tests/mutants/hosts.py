"""Lists defects in runs on several hosts: unconfirmed deaths, lost hosts, placement."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

BOOK = "launch/placement/book.py"
SCHEDULER = "services/scheduler/state.py"
LARGE = "tests/unit/scheduler/test_large_runs.py"
STORES = "tests/unit/scheduler/test_stores.py"
PLACES = "tests/property/test_host_book.py::test_every_process_has_exactly_one_place_whatever_happens_to_the_hosts"
RETURNS = "tests/unit/launch/test_host_book.py::test_a_returning_host_runs_processes_that_found_no_other_place"

DESK = "tests/unit/launch/test_host_desk.py"

HOSTS = [
    Mutation(
        "a host whose clock is behind may join",
        "launch/placement/facts.py",
        "if abs(there.clock_s) > CLOCK_LIMIT_S:",
        "if there.clock_s > CLOCK_LIMIT_S:",
        f"{DESK}::test_an_agent_that_differs_from_home_is_refused_and_the_user_is_told_once",
    ),
    Mutation(
        "the user is not told why an agent is refused",
        "launch/placement/desk.py",
        "if error.code == ErrorCode.BAD_REQUEST and self._refused.get(host) != text:",
        "if error.code == ErrorCode.CONFLICT and self._refused.get(host) != text:",
        f"{DESK}::test_an_agent_that_differs_from_home_is_refused_and_the_user_is_told_once",
    ),
    Mutation(
        "the reason why a host cannot join is repeated",
        BOOK,
        "not self.ending and host.cause != cause:",
        "not self.ending:",
        "tests/unit/launch/test_host_book.py::test_the_user_is_told_once_why_a_host_cannot_join",
    ),
    Mutation(
        "a process that the supervisor did not start counts as dead",
        "launch/supervisor/server.py",
        "if (key, request.pid) in self._ended_lives:",
        "if child is None or child.pid != request.pid:",
        "tests/unit/launch/test_supervisor_server.py::test_supervisor_confirms_the_death_of_only_its_own_processes",
    ),
    Mutation(
        "a process whose exit was not observed never counts as having exited",
        SCHEDULER,
        "return row is None or row.incarnation != incarnation or seen is None or now - seen.at > GONE_S",
        "return known is None or known.incarnation != incarnation",
        f"{STORES}::test_a_process_whose_end_was_not_observed_counts_as_ended_after_another_registration_or_a_long_silence",
    ),
    Mutation(
        "the scheduler waits indefinitely for a store that the topology places",
        SCHEDULER,
        "> GONE_S and holder[0] == STORE and service_name(*holder) != TRAINER_STORE",
        "> GONE_S and holder[0] == STORE and holder[1] > 1",
        f"{STORES}::test_a_silent_store_that_the_topology_places_is_declared_gone_and_its_tasks_are_sampled_again",
    ),
    Mutation(
        "the trainer puts data into the store of the first host by name",
        "shared/topology/schema.py",
        "return [self.home, *sorted({*named, *self.placement.hosts} - {self.home})]",
        'return sorted({self.home, *named, *self.placement.hosts}, key=lambda host: host or "")',
        "tests/unit/shared/topology/test_topology.py::test_the_trainers_host_has_the_store_that_the_trainer_uses",
    ),
    Mutation(
        "the leases of a lost host end only when they expire",
        SCHEDULER,
        "self._durable(LeaseExpired(lease.lease_id, not_started=True))",
        "continue",
        f"{STORES}::test_the_leases_of_a_lost_process_are_reassigned_although_a_store_on_its_host_is_alive",
    ),
    Mutation(
        "a lost host's store is accepted again when it is heard from again",
        SCHEDULER,
        "if request.incarnation in self._lost_lives:",
        "if request.incarnation in self._lost_lives and request.service != STORE:",
        f"{STORES}::test_a_store_that_returns_after_its_host_was_lost_is_not_registered_again",
    ),
    Mutation(
        "the processes of a lost host are not moved to another host",
        BOOK,
        """        effects.append(Told(f"host {name} is lost: {cause}"))
        self._place_homeless(effects)""",
        """        effects.append(Told(f"host {name} is lost: {cause}"))""",
        PLACES,
    ),
    Mutation(
        "a process is given another process's GPUs",
        BOOK,
        "if place.unit is not unit",
        "if place.unit is unit",
        PLACES,
    ),
    Mutation(
        "a host that was lost returns with its former store",
        BOOK,
        "if host.state == HostState.LOST:  # its former",
        "if host.state == HostState.ENDED:  # its former",
        RETURNS,
    ),
    Mutation(
        "the agent of a host that was declared lost is accepted again",
        BOOK,
        "if report.incarnation in host.given_up:",
        "if report.incarnation in host.given_up and not host.report:",
        RETURNS,
    ),
    Mutation(
        "a service sends heartbeats as often as it likes",
        "shared/actor/service.py",
        "registered, every_s = True, answer.heartbeat_s",
        "registered, every_s = True, HEARTBEAT_S",
        "tests/unit/shared/actor/test_actor.py::test_heartbeats_are_sent_as_often_as_the_scheduler_asks_for",
    ),
    Mutation(
        "one event answers all deferred leases",
        SCHEDULER,
        "for _ in range(min(len(queue), ANSWERED_AT_ONCE)):",
        "for _ in range(len(queue)):",
        f"{LARGE}::test_a_burst_of_deferred_leases_is_answered_in_parts_so_that_other_requests_are_answered_in_between",
    ),
    Mutation(
        "every event examines the clears of every store",
        SCHEDULER,
        "for store in self.run.shards.clears.take_changed():",
        "for store in self.run.shards.clears.stores:",
        f"{LARGE}::test_the_work_for_a_request_does_not_depend_on_the_number_of_processes",
    ),
    Mutation(
        "the next clears of a store are sent only when new ones arrive",
        "services/scheduler/shards.py",
        """        queue = self._queues[store]
        self._changed[store] = None
""",
        """        queue = self._queues[store]
""",
        f"{LARGE}::test_clears_beyond_one_message_are_sent_once_the_message_is_acknowledged",
    ),
    Mutation(
        "the scheduler exits before the processes on other hosts",
        "launch/supervisor/state.py",
        "if self._hosts and DRAIN_ORDER[index] in LAST:",
        "if self._hosts and index > len(DRAIN_ORDER):",
        "tests/unit/launch/test_supervisor_hosts.py::test_processes_to_which_other_hosts_connect_run_until_those_hosts_have_ended",
    ),
    Mutation(
        "a damaged chunk of a version is passed on",
        "services/batch_store/filling_file.py",
        "if xxhash.xxh3_64_intdigest(self._view[at:end]) != self._digest(at // CHUNK_BYTES):",
        "if self._digest(at // CHUNK_BYTES) < 0:",
        "tests/unit/batch_store/test_filling_file.py::test_a_damaged_chunk_stays_unavailable_and_is_received_again",
    ),
    Mutation(
        "copies of a version outlive it",
        "services/scheduler/shards.py",
        "[ref.store, *self.away_stores()]",
        "[ref.store]",
        f"{STORES}::test_a_version_is_cleared_with_its_copies",
    ),
    Mutation(
        "stores are told to copy weights from silent stores",
        SCHEDULER,
        "self._now - seen.at < ABSENT_S",
        "self._now - seen.at < GONE_S",
        f"{STORES}::test_stores_copy_weights_from_earlier_stores_on_other_hosts_unless_those_stores_are_silent",
    ),
    Mutation(
        "the log-probs of ranks on other hosts are not counted and are never removed",
        "services/scheduler/shards.py",
        "for holder in self.registry.on_host(host) if holder[0] == STORE)",
        "for holder in self.registry.on_host(host) if False)",
        f"{STORES}::test_log_probs_from_ranks_on_two_hosts_are_counted_in_the_stores_of_both",
    ),
    Mutation(
        "ranks alternate between hosts",
        "shared/topology/schema.py",
        "blocks = [copy * spread + rank * spread // ranks for",
        "blocks = [copy * spread + rank % spread for",
        "tests/unit/shared/topology/test_topology.py::"
        "test_copies_alternate_between_hosts_and_ranks_of_one_copy_are_divided_into_blocks",
    ),
    Mutation(
        "tensor-parallel ranks are on two hosts",
        "shared/topology/split_checks.py",
        "if ranks % hosts or each % close:",
        "if ranks % hosts:",
        "tests/unit/shared/topology/test_refusals.py::test_hosts_that_cannot_run_their_services_are_refused",
    ),
    Mutation(
        "the access file that agents wait for remains when the run is over",
        "launch/cluster.py",
        "                stack.callback(access.unlink, missing_ok=True)\n",
        "",
        "tests/integration/hosts/test_exported_access.py"
        "::test_an_agent_waits_for_the_access_file_which_exists_as_long_as_the_run",
    ),
]
