"""Lists defects in the scheduler: leases, fences, stages, admission, versions, steps, collection, rows."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

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
        "steps that the journal forgot without a note count as forgotten",
        JOURNAL,
        "if wrong := found ^ {step for step in rows if step >= first}:",
        "if wrong := found - {*rows}:",
        "tests/unit/scheduler/test_forgotten_steps.py::test_a_missing_row_that_was_not_forgotten_is_reported",
    ),
    Mutation(
        "the journal does not note that a run has returned to before the steps that it forgot",
        JOURNAL,
        "if effect.step < self.forgotten:",
        "if False:",
        "tests/unit/scheduler/test_forgotten_steps.py"
        "::test_a_run_that_returns_to_before_the_forgotten_steps_writes_their_rows_again",
    ),
    Mutation(
        "a completion is accepted under a lease that does not hold the task",
        COMPLETING,
        "lease is None or task.lease != lease.lease_id or lease.stage",
        "lease is None or lease.stage",
        f"{LEASES}::test_a_result_counts_only_under_the_lease_that_holds_its_task",
    ),
    Mutation(
        "a completion is accepted from another life of the lease holder",
        COMPLETING,
        "if lease is not None and lease.incarnation != request.incarnation:",
        "if False:",
        f"{LEASES}::test_a_result_from_an_earlier_incarnation_of_the_holder_is_refused",
    ),
    Mutation(
        "a completion is accepted for a stage other than its lease's",
        COMPLETING,
        " or lease.stage != stage:",
        ":",
        f"{LEASES}::test_a_result_counts_only_for_the_stage_of_its_lease",
    ),
    Mutation(
        "a late result under a lower fence is accepted",
        COMPLETING,
        "if result.fence < task.fence:",
        "if False:",
        f"{LEASES}::test_loss_of_a_lease_raises_the_fence_deletes_the_old_result_and_refuses_a_late_one",
    ),
    Mutation(
        "a result under a fence that was never granted is accepted",
        COMPLETING,
        "if result.fence > task.fence:",
        "if False:",
        f"{LEASES}::test_a_fence_that_was_never_granted_is_a_conflict",
    ),
    Mutation(
        "different content under an accepted fence is a no-op instead of a conflict",
        COMPLETING,
        " and accepted.content_hash == result.content_hash:",
        ":",
        f"{LEASES}::test_a_repeated_result_is_a_no_op_and_a_different_result_is_a_conflict",
    ),
    Mutation(
        "a group with only one survivor is trained on",
        COMPLETING,
        "result.samples < min(2, ledger.plan.group_size)",
        "result.samples < 1",
        f"{LEASES}::test_a_training_task_with_only_one_surviving_sample_is_dropped",
    ),
    Mutation(
        "the next attempt of a task keeps the previous fence",
        "services/scheduler/tasks.py",
        "task.fence = max(task.fence + 1, self.least_fence)",
        "task.fence = max(task.fence, self.least_fence)",
        f"{LEASES}::test_loss_of_a_lease_raises_the_fence_deletes_the_old_result_and_refuses_a_late_one",
    ),
    Mutation(
        "a heartbeat without progress renews a lease",
        "services/scheduler/leases.py",
        "if report.progress > pace.progress:",
        "if report.progress >= pace.progress:",
        f"{LEASES}::test_only_progress_renews_a_lease",
    ),
    Mutation(
        "a retried lease request is given a second lease",
        "services/scheduler/state.py",
        "if before is not None:",
        "if False:",
        f"{LEASES}::test_a_retried_request_gets_the_same_grant",
    ),
    Mutation(
        "admission forgets the tasks of the open step",
        ORDERS,
        "min(plan.max_live - len(history.open_batch), left)",
        "min(plan.max_live, left)",
        f"{ADMITTED}::test_the_tasks_of_a_step_in_training_are_live_until_it_is_committed",
    ),
    Mutation(
        "admission goes one step further than staleness allows",
        "services/scheduler/plan.py",
        "return (self.staleness + 1) * self.tasks_per_step",
        "return (self.staleness + 2) * self.tasks_per_step",
        f"{ADMITTED}::test_live_tasks_never_exceed_the_bound",
    ),
    Mutation(
        "a task may be sampled with a version that is one step too old",
        LEASING,
        "task.admission) - 1 - ledger.plan.staleness",
        "task.admission) - 2 - ledger.plan.staleness",
        f"{ADMITTED}::test_a_lease_names_the_oldest_version_with_which_its_step_may_be_sampled",
    ),
    Mutation(
        "`consume: completion` trains on tokens that are older than staleness allows",
        ORDERS,
        "if staleness <= allowed:",
        "if staleness <= allowed + 1:",
        f"{COMPLETION}::test_a_task_whose_oldest_token_is_too_old_when_it_finishes_is_dropped_and_counted",
    ),
    Mutation(
        "weights that a lease names are deleted",
        HISTORY,
        "            and version not in named\n",
        "",
        f"{COLLECTED}::test_a_version_is_collected_when_no_lease_and_no_evaluation_refers_to_it",
    ),
    Mutation(
        "a block spans two steps",
        ORDERS,
        "if group not in (-1, key):",
        "if False:",
        f"{ADMITTED}::test_a_lease_never_spans_two_steps",
    ),
    Mutation(
        "a step that was committed is committed again",
        HISTORY,
        "if step <= self.committed_step:",
        "if step < self.committed_step:",
        f"{STEPS}::test_a_repeated_commit_is_carried_out_only_once",
    ),
    Mutation(
        "a step that is requested again gets different tasks",
        STEPPING,
        "if step > history.batched_step:\n        if step",
        "if step >= history.batched_step:\n        if step",
        f"{STEPS}::test_a_repeated_request_for_a_batch_gets_the_same_batch_and_a_step_out_of_order_is_a_conflict",
    ),
    Mutation(
        "calls of a replaced driver are executed",
        HISTORY,
        "if driver != self.driver:\n            raise",
        "if False:\n            raise",
        f"{STEPS}::test_a_newer_driver_fences_off_the_older_one",
    ),
    Mutation(
        "tasks are collected before the oldest kept checkpoint covers them",
        STEPPING,
        "ledger.collect_steps(kept[0])",
        "ledger.collect_steps(kept[-1])",
        f"{COLLECTED}::test_trained_tasks_wait_for_the_oldest_kept_checkpoint",
    ),
    Mutation(
        "a checkpoint of a step that is not committed collects its tasks",
        HISTORY,
        "if not 0 <= request.step <= self.committed_step:",
        "if False:",
        "tests/unit/scheduler/test_refusals.py::test_checkpoint_of_a_step_that_is_not_committed_is_refused",
    ),
    Mutation(
        "reconciliation clears leased or accepted shards",
        "services/scheduler/audits.py",
        "task is None or entry.fence < task.fence",
        "task is None or entry.fence <= task.fence",
        f"{COLLECTED}::test_reconciliation_clears_only_shards_that_no_peer_may_read",
    ),
    Mutation(
        "a task counts as collected before every store has acknowledged",
        LEDGER,
        "                if not task.clears:\n",
        "                if True:\n",
        f"{STORES}::test_a_clear_is_sent_to_the_stores_that_hold_the_task_and_waits_only_for_them",
    ),
    Mutation(
        "free space in one store is counted for another",
        LEDGER,
        "free = min(",
        "free = max(",
        f"{STORES}::test_a_task_is_admitted_only_if_every_store_could_hold_it",
    ),
    Mutation(
        "a change to the state is not journaled",
        "services/scheduler/state.py",
        "self._answer(asked, self._durable(request) or Ack())",
        "self._answer(asked, self.run.apply(request).reply or Ack())",
        f"{REPLAY}::test_replay_restores_the_same_state",
    ),
    Mutation(
        "a row is written before the evaluation of its version",
        HISTORY,
        " and self.evaluated(self.next_row) is not None:",
        ":",
        f"{EVALUATED}::test_rows_are_written_in_step_order_and_wait_for_their_evaluation",
    ),
    Mutation(
        "metrics.jsonl gets the row of a step twice",
        "services/scheduler/metrics_file.py",
        "if step > self.step:",
        "if step >= self.step:",
        "tests/unit/scheduler/test_refusals.py::test_an_existing_row_is_not_written_again",
    ),
    Mutation(
        "a reply is sent before its decision is in the journal",
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
        "a task changes its state along an edge that is not in the table",
        "services/scheduler/tasks.py",
        "if state not in TRANSITIONS[before]:",
        "if False:",
        "tests/unit/scheduler/test_run_state.py::test_a_task_changes_state_only_as_the_table_of_transitions_allows",
    ),
    Mutation(
        "an inventory does not reveal missing shards",
        STATE,
        "        if audit.missing:\n",
        "        if False:\n",
        f"{LOSS}::test_an_inventory_reveals_missing_shards_and_the_store_is_asked_about_them_again",
    ),
    Mutation(
        "a reader's report alone is enough for a task to count as lost",
        STATE,
        "if held is not None and not claim.met(held)]",
        "]",
        f"{LOSS}::test_a_report_that_the_store_does_not_confirm_changes_nothing",
    ),
    Mutation(
        "lost shards count as a failed attempt",
        RECOVERY,
        'ledger.retry(task, 0, f"{store} lost its',
        'ledger.retry(task, 4, f"{store} lost its',
        f"{LOSS}::test_a_ready_task_whose_shards_are_lost_is_sampled_again_without_counting_an_attempt",
    ),
    Mutation(
        "an open step is served again although some of its shards are lost",
        STEPPING,
        "if any(task.lost for task in history.open_batch):",
        "if False:",
        f"{LOSS}::test_an_open_step_is_served_again_with_the_same_tasks_in_the_same_order",
    ),
    Mutation(
        "a step is replayed although some of its shards are lost",
        STEPPING,
        "if tasks is None or any(task.lost for task in tasks):",
        "if tasks is None:",
        f"{LOSS}::test_a_trainer_that_needs_the_lost_shard_for_a_replay_returns_to_its_checkpoint",
    ),
    Mutation(
        "the chain does not cover the body of an event",
        "services/scheduler/tables.py",
        "_EVENT.pack(seq, kind, at), body)",
        "_EVENT.pack(seq, kind, at))",
        f"{DAMAGE}::test_one_changed_value_anywhere_is_reported",
    ),
    Mutation(
        "the chain of a journal is not compared with its events",
        JOURNAL,
        """\
                if chain != found:
                    raise ValueError("its checksum does not match")
                last = seq
""",
        "                last = seq\n",
        f"{DAMAGE}::test_one_changed_value_anywhere_is_reported",
    ),
    Mutation(
        "rows of the readable tables are not checked",
        JOURNAL,
        "WHERE sum IS NOT checksum(",
        "WHERE sum IS NULL AND sum IS NOT checksum(",
        f"{DAMAGE}::test_one_changed_value_anywhere_is_reported",
    ),
    Mutation(
        "a missing row of a table is not noticed",
        JOURNAL,
        "if wrong := found ^ {step for step in rows if step >= first}:",
        "if wrong := found - {step for step in rows if step >= first}:",
        f"{DAMAGE}::test_a_missing_row_is_reported",
    ),
    Mutation(
        "the mark is not compared with the journal",
        JOURNAL,
        "if self.seq < seq:",
        "if False:",
        f"{DAMAGE}::test_a_log_cut_anywhere_leaves_an_earlier_history_that_is_known_to_be_incomplete",
    ),
    Mutation(
        "another history is mistaken for the marked one",
        JOURNAL,
        "if known not in ([], [(chain,)]) else",
        "if False else",
        f"{DAMAGE}::test_another_history_of_the_same_length_is_not_mistaken_for_the_marked_one",
    ),
    Mutation(
        "the mark names events before they are in the journal",
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
        "services/scheduler/tasks.py",
        "fence = max(fence, self.least_fence)",
        "fence = max(fence, 1)",
        f"{LOST_END}::test_a_run_whose_journal_ends_anywhere_continues_without_the_effects_of_later_events",
    ),
    Mutation(
        "waiting tasks keep their fences when the end of the journal is lost",
        LEDGER,
        "if task.state == TaskState.PENDING:",
        "if False:",
        f"{LOST_END}::test_a_run_whose_journal_ends_anywhere_continues_without_the_effects_of_later_events",
    ),
    Mutation(
        "lease numbers do not jump when the end of the journal is lost",
        RECOVERY,
        "ledger.skip_lease_ids(MARGIN)",
        "ledger.skip_lease_ids(0)",
        f"{LOST_END}::test_a_run_whose_journal_ends_anywhere_continues_without_the_effects_of_later_events",
    ),
    Mutation(
        "the run keeps steps whose rows contradict metrics.jsonl when the end of the journal is lost",
        RECOVERY,
        "step = min(max(history.checkpoint_step, 0), event.agreed)",
        "step = max(history.checkpoint_step, 0)",
        f"{LOST_END}::test_steps_whose_rows_are_from_another_history_are_also_rolled_back",
    ),
]
