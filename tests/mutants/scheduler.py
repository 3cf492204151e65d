"""Lists defects in the scheduler: leases, fences, stages, admission, versions, steps, collection, rows."""

from __future__ import annotations

from tests.mutants.mutation import Mutation
from tests.mutants.promises import Promise

COMPLETING = "services/scheduler/completion.py"
HISTORY = "services/scheduler/history.py"
LEDGER = "services/scheduler/ledger.py"
LEASING = "services/scheduler/leasing.py"
ORDERS = "services/scheduler/orders.py"
RECOVERY = "services/scheduler/recovery.py"
STEPPING = "services/scheduler/steps.py"
LEASES = "tests/unit/scheduler/test_leases.py"
ADMITTED = "tests/unit/scheduler/test_admission.py"
STEPS = "tests/unit/scheduler/test_steps.py"
COLLECTED = "tests/unit/scheduler/test_collection.py"
EVALUATED = "tests/unit/scheduler/test_evaluations.py"
REPLAY = "tests/unit/scheduler/test_replay.py"
COMPLETION = "tests/unit/scheduler/test_completion.py"
STORES = "tests/unit/scheduler/test_stores.py"
JOURNAL = "services/scheduler/journal.py"
DAMAGE = "tests/unit/scheduler/test_journal_damage.py"
LOST_END = "tests/unit/scheduler/test_lost_end.py"
LOSS = "tests/unit/scheduler/test_shard_loss.py"
STATE = "services/scheduler/state.py"

SCHEDULER = [
    Mutation(
        "a completion is accepted from another life of the lease holder",
        Promise.ONCE,
        COMPLETING,
        "if lease is not None and lease.incarnation != request.incarnation:",
        "if False:",
        f"{LEASES}::test_a_result_from_an_earlier_incarnation_of_the_holder_is_refused",
    ),
    Mutation(
        "a late result under a lower fence is accepted",
        Promise.ONCE,
        COMPLETING,
        "if result.fence < task.fence:",
        "if False:",
        f"{LEASES}::test_loss_of_a_lease_raises_the_fence_deletes_the_old_result_and_refuses_a_late_one",
    ),
    Mutation(
        "different content under an accepted fence is a no-op instead of a conflict",
        Promise.ONCE,
        COMPLETING,
        " and accepted.content_hash == result.content_hash:",
        ":",
        f"{LEASES}::test_a_repeated_result_is_a_no_op_and_a_different_result_is_a_conflict",
    ),
    Mutation(
        "the next attempt of a task keeps the previous fence",
        Promise.ONCE,
        "services/scheduler/tasks.py",
        "task.fence = max(task.fence + 1, self.least_fence)",
        "task.fence = max(task.fence, self.least_fence)",
        f"{LEASES}::test_loss_of_a_lease_raises_the_fence_deletes_the_old_result_and_refuses_a_late_one",
    ),
    Mutation(
        "a heartbeat without progress renews a lease",
        Promise.DEADLINES,
        "services/scheduler/leases.py",
        "if report.progress > pace.progress:",
        "if report.progress >= pace.progress:",
        f"{LEASES}::test_only_progress_renews_a_lease",
    ),
    Mutation(
        "a retried lease request is given a second lease",
        Promise.ONCE,
        "services/scheduler/state.py",
        "if before is not None:",
        "if False:",
        f"{LEASES}::test_a_retried_request_gets_the_same_grant",
    ),
    Mutation(
        "admission forgets the tasks of the open step",
        Promise.STALENESS,
        ORDERS,
        "min(plan.max_live - len(history.open_batch), left)",
        "min(plan.max_live, left)",
        f"{ADMITTED}::test_the_tasks_of_a_step_in_training_are_live_until_it_is_committed",
    ),
    Mutation(
        "admission goes one step further than staleness allows",
        Promise.STALENESS,
        "services/scheduler/plan.py",
        "return (self.staleness + 1) * self.tasks_per_step",
        "return (self.staleness + 2) * self.tasks_per_step",
        f"{ADMITTED}::test_live_tasks_never_exceed_the_bound",
    ),
    Mutation(
        "a task may be sampled with a version that is one step too old",
        Promise.STALENESS,
        LEASING,
        "task.admission) - 1 - ledger.plan.staleness",
        "task.admission) - 2 - ledger.plan.staleness",
        f"{ADMITTED}::test_a_lease_names_the_oldest_version_with_which_its_step_may_be_sampled",
    ),
    Mutation(
        "`consume: completion` trains on tokens that are older than staleness allows",
        Promise.STALENESS,
        ORDERS,
        "if staleness <= allowed:",
        "if staleness <= allowed + 1:",
        f"{COMPLETION}::test_a_task_whose_oldest_token_is_too_old_when_it_finishes_is_dropped_and_counted",
    ),
    Mutation(
        "weights that a lease names are deleted",
        Promise.COLLECTED,
        HISTORY,
        "            and version not in named\n",
        "",
        f"{COLLECTED}::test_a_version_is_collected_when_no_lease_and_no_evaluation_refers_to_it",
    ),
    Mutation(
        "a block spans two steps",
        Promise.SAME_BITS,
        ORDERS,
        "if group not in (-1, key):",
        "if False:",
        f"{ADMITTED}::test_a_lease_never_spans_two_steps",
    ),
    Mutation(
        "a step that was committed is committed again",
        Promise.ONCE,
        HISTORY,
        "if step <= self.committed_step:",
        "if step < self.committed_step:",
        f"{STEPS}::test_a_repeated_commit_is_carried_out_only_once",
    ),
    Mutation(
        "a step that is requested again gets different tasks",
        Promise.ONCE,
        STEPPING,
        "if step > history.batched_step:\n        if step",
        "if step >= history.batched_step:\n        if step",
        f"{STEPS}::test_a_repeated_request_for_a_batch_gets_the_same_batch_and_a_step_out_of_order_is_a_conflict",
    ),
    Mutation(
        "calls of a replaced driver are executed",
        Promise.ONCE,
        HISTORY,
        "if driver != self.driver:\n            raise",
        "if False:\n            raise",
        f"{STEPS}::test_a_newer_driver_fences_off_the_older_one",
    ),
    Mutation(
        "tasks are collected before the oldest kept checkpoint covers them",
        Promise.COLLECTED,
        STEPPING,
        "ledger.collect_steps(kept[0])",
        "ledger.collect_steps(kept[-1])",
        f"{COLLECTED}::test_trained_tasks_wait_for_the_oldest_kept_checkpoint",
    ),
    Mutation(
        "reconciliation clears leased or accepted shards",
        Promise.READABLE,
        "services/scheduler/audits.py",
        "task is None or entry.fence < task.fence",
        "task is None or entry.fence <= task.fence",
        f"{COLLECTED}::test_reconciliation_clears_only_shards_that_no_peer_may_read",
    ),
    Mutation(
        "a task counts as collected before every store has acknowledged",
        Promise.COLLECTED,
        LEDGER,
        "                if not task.clears:\n",
        "                if True:\n",
        f"{STORES}::test_a_clear_is_sent_to_the_stores_that_hold_the_task_and_waits_only_for_them",
    ),
    Mutation(
        "free space in one store is counted for another",
        Promise.BYTES,
        LEDGER,
        "free = min(",
        "free = max(",
        f"{STORES}::test_a_task_is_admitted_only_if_every_store_could_hold_it",
    ),
    Mutation(
        "a change to the state is not journaled",
        Promise.KILLED,
        "services/scheduler/state.py",
        "self._answer(asked, self._durable(request) or Ack())",
        "self._answer(asked, self.run.apply(request).reply or Ack())",
        f"{REPLAY}::test_replay_restores_the_same_state",
    ),
    Mutation(
        "a reply is sent before its decision is in the journal",
        Promise.KILLED,
        "services/scheduler/server.py",
        """\
            self._journal.commit()
            effects, self._effects = self._effects, []
            for effect in effects:
                self._carry_out(effect)
""",
        """\
            effects, self._effects = self._effects, []
            for effect in effects:
                self._carry_out(effect)
            self._journal.commit()
""",
        "tests/integration/scheduler/test_scheduler_disk.py",
    ),
    Mutation(
        "an inventory does not reveal missing shards",
        Promise.READABLE,
        "services/scheduler/audits.py",
        "for store, audit in self._compared.items() if audit.missing",
        "for store, audit in self._compared.items() if False",
        f"{LOSS}::test_an_inventory_reveals_missing_shards_and_the_store_is_asked_about_them_again",
    ),
    Mutation(
        "an open step is served again although some of its shards are lost",
        Promise.READABLE,
        STEPPING,
        "if any(task.lost for task in history.open_batch):",
        "if False:",
        f"{LOSS}::test_an_open_step_is_served_again_with_the_same_tasks_in_the_same_order",
    ),
    Mutation(
        "the chain of a journal is not compared with its events",
        Promise.KILLED,
        JOURNAL,
        """\
                if chain != stored:
                    raise ValueError("its checksum does not match")
                last = seq
""",
        "                last = seq\n",
        f"{DAMAGE}::test_one_changed_value_anywhere_is_reported",
    ),
    Mutation(
        "the mark is not compared with the journal",
        Promise.KILLED,
        JOURNAL,
        "if self.seq < seq:",
        "if False:",
        f"{DAMAGE}::test_a_log_cut_anywhere_leaves_an_earlier_history_that_is_known_to_be_incomplete",
    ),
    Mutation(
        "the mark names events before they are in the journal",
        Promise.KILLED,
        JOURNAL,
        """\
            self._end()
            self._mark.write(self._reached())
""",
        """\
            self._mark.write(self._reached())
            self._end()
""",
        f"{DAMAGE}::test_a_kill_between_commit_and_mark_loses_nothing",
    ),
    Mutation(
        "tasks admitted after the loss of the journal's end get fences that stores may already know",
        Promise.ONCE,
        "services/scheduler/tasks.py",
        "fence = max(fence, self.least_fence)",
        "fence = max(fence, 1)",
        f"{LOST_END}::test_a_run_whose_journal_ends_anywhere_continues_without_the_effects_of_later_events",
    ),
]
