"""Lists defects in recorded samples: what is kept for the recorder and for how long, and the content of the files."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

LEDGER = "services/scheduler/ledger.py"
STATE = "services/scheduler/state.py"
FILES = "services/recorder/files.py"
DUE = "tests/unit/scheduler/test_records.py"
WRITTEN = "tests/unit/recorder/test_files.py"
BUILT = "tests/unit/recorder/test_build.py"
READ = "tests/unit/shared/test_samples_reader.py"

SAMPLES = [
    Mutation(
        "a samples file whose first record is incomplete replaces discarded samples",
        FILES,
        "            return False\n\n    def _trim",
        "            return True\n\n    def _trim",
        WRITTEN,
    ),
    Mutation(
        "discarded samples count twice against the limit",
        FILES,
        "        self.nbytes -= size\n",
        "",
        WRITTEN,
    ),
    Mutation(
        "a filtered task is cleared before the recorder has its samples",
        LEDGER,
        "if due is None or task.parts[0] is None:",
        "if True:",
        f"{DUE}::test_a_filtered_task_is_cleared_only_after_the_recorder_has_taken_it",
    ),
    Mutation(
        "the scheduler waits for a recorder that is absent",
        STATE,
        "if silent or self._now - self._held_since[key] > HOLD_S]",
        "if False]",
        f"{DUE}::test_the_scheduler_does_not_wait_for_a_recorder_that_is_away",
    ),
    Mutation(
        "tasks that wait for the recorder take up the space of others",
        LEDGER,
        "excess = self.records.held_bytes - room if self.plan.task_bytes else 0",
        "excess = 0",
        f"{DUE}::test_the_oldest_tasks_are_released_when_they_take_up_room_that_others_need",
    ),
    Mutation(
        "due samples of steps that were rolled back are recorded",
        LEDGER,
        "for task_id, due in self.records.due.items() if due.step > step]",
        "for task_id, due in self.records.due.items() if False]",
        f"{DUE}::test_samples_of_rolled_back_steps_are_not_due_and_the_recorder_is_told_once_to_discard_them",
    ),
    Mutation(
        "a task is written twice",
        FILES,
        "if first.task in known:",
        "if False:",
        f"{WRITTEN}::test_a_task_is_written_only_once_even_after_a_restart",
    ),
    Mutation(
        "samples of a later lineage are discarded again by a restarted recorder",
        FILES,
        " or not self._is_of(path, lineage):",
        ":",
        f"{WRITTEN}::test_samples_of_rolled_back_steps_are_moved_away_and_those_of_repeated_steps_are_kept",
    ),
    Mutation(
        "the text of a task that the rollout dropped is cleared before the recorder has it",
        "services/scheduler/completion.py",
        "if result.store and result.store not in ledger.shards.gone:",
        "if False:",
        f"{DUE}::test_the_text_of_a_task_that_the_rollout_dropped_is_kept_until_the_recorder_has_taken_it",
    ),
    Mutation(
        "a part of a reward replaces the part of the same name of another function",
        "services/rollout/rewards/score.py",
        'key if counts[key] == 1 else f"{name}/{key}": value',
        "key: value",
        "tests/unit/rollout/test_rewards.py::test_parts_of_the_same_name_get_the_name_of_their_function",
    ),
    Mutation(
        "a failed sample is recorded without the failure",
        "services/recorder/build.py",
        "        failure=said.failure,\n",
        "",
        f"{BUILT}::test_failed_samples_come_last_without_a_reward_and_do_not_count_for_the_group",
    ),
    Mutation(
        "the text of a sample has no size limit",
        "shared/samples/text.py",
        "        _cut_text(text, limit)\n",
        "        pass\n",
        f"{BUILT}::test_text_beyond_its_limit_is_left_out_and_counted",
    ),
    Mutation(
        "a split's name leads out of the folder",
        "shared/samples/reader.py",
        'return split == TRAIN or (name != split and "/" not in name and name not in ("", ".", ".."))',
        "return True",
        f"{READ}::test_a_name_that_is_not_a_split_has_no_samples",
    ),
]
