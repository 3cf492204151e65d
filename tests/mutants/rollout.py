"""Lists defects in rollout and weight syncs: versions, verification of weights, and samples."""

from __future__ import annotations

from tests.mutants.mutation import Mutation
from tests.mutants.promises import Promise

SYNC = "services/rollout/weights/sync.py"
SCORE = "services/rollout/rewards/score.py"
TRAJECTORY = "services/rollout/sampling/trajectory.py"
WEIGHTS = "tests/unit/rollout/test_weights.py"
VERSIONS = "tests/unit/rollout/test_versions.py"
REWARDS = "tests/unit/rollout/test_rewards.py"
SHARDS = "tests/unit/rollout/test_assemble.py::test_shards_are_ragged_and_mark_the_sampled_tokens"

ROLLOUT = [
    Mutation(
        "the drill counts before it is verified",
        Promise.SYNCED,
        SYNC,
        "        error = await self._prove(ref.drill, ref.drill.tolerance",
        "        self._drilled.add(loaded.entry)\n        error = await self._prove(ref.drill, ref.drill.tolerance",
        f"{WEIGHTS}::test_an_entry_counts_as_drilled_only_after_the_canary_of_the_drill_matched",
    ),
    Mutation(
        "the start-up drill is left out",
        Promise.SYNCED,
        SYNC,
        "            await self._drill(coming.ref, entry)\n",
        "            self._drilled.add(entry)\n",
        f"{WEIGHTS}::test_an_update_that_never_reaches_one_parameter_fails_the_drill",
    ),
    Mutation(
        "a version counts as held before its canary has matched",
        Promise.SYNCED,
        SYNC,
        "        error = await self._prove(ref.canary, self._tolerance",
        "        self.holds = Version(ref.lineage, ref.step)\n"
        "        error = await self._prove(ref.canary, self._tolerance",
        f"{WEIGHTS}::test_an_engine_with_the_right_weights_and_a_wrong_computation_fails_the_canary",
    ),
    Mutation(
        "the engine's weights are not compared with those it was given",
        Promise.SYNCED,
        SYNC,
        "            await self._engine.verify(loaded.given, announced)\n",
        "            pass\n",
        f"{WEIGHTS}::test_a_version_that_differs_from_the_announced_one_by_a_bit_is_refused",
    ),
    Mutation(
        "the canary's tolerance is a thousand times wider",
        Promise.SYNCED,
        "services/policy_trainer/worker/weights/publish.py",
        "\nTOLERANCE = 1e-4\n",
        "\nTOLERANCE = 0.1\n",
        f"{WEIGHTS}::test_production_tolerances_have_fixed_values",
    ),
    Mutation(
        "a canary that is NaN passes",
        Promise.SYNCED,
        SYNC,
        "        if not error <= tolerance:",
        "        if error > tolerance:",
        f"{WEIGHTS}::test_a_nan_in_the_trainers_canary_is_a_mismatch",
    ),
    Mutation(
        "an engine behind its lease samples with its old version",
        Promise.STALENESS,
        SYNC,
        "return version != wanted if exact else version < wanted",
        "return version != wanted if exact else False",
        f"{WEIGHTS}::test_an_engine_loads_newer_versions_and_the_exact_one_that_is_requested",
    ),
    Mutation(
        "an engine ahead of an exact lease samples with its newer version",
        Promise.SAME_BITS,
        SYNC,
        "return version != wanted if exact else version < wanted",
        "return version < wanted",
        f"{WEIGHTS}::test_an_engine_loads_newer_versions_and_the_exact_one_that_is_requested",
    ),
    Mutation(
        "a token of unverified weights gets a version",
        Promise.SYNCED,
        TRAJECTORY,
        "if (counts[at] != swaps).any():",
        "if False:",
        f"{VERSIONS}::test_no_token_is_sampled_with_weights_that_fail_verification",
    ),
    Mutation(
        "the prompt is trained on",
        Promise.LOSS,
        TRAJECTORY,
        "not_sampled, no_logprobs = np.zeros(given, np.uint8)",
        "not_sampled, no_logprobs = np.ones(given, np.uint8)",
        SHARDS,
    ),
    Mutation(
        "the last token, which ends the answer, is not trained on",
        Promise.LOSS,
        TRAJECTORY,
        "np.ones(len(answer.token_ids), np.uint8)",
        "np.arange(len(answer.token_ids)) < len(answer.token_ids) - 1",
        SHARDS,
    ),
    Mutation(
        "every sample gets the versions of the first one",
        Promise.STALENESS,
        TRAJECTORY,
        "steps[end - len(counts) : end]",
        "steps[: len(counts)]",
        "tests/unit/rollout/test_in_flight.py::test_every_token_carries_the_version_that_sampled_it",
    ),
    Mutation(
        "a failed sample is trained on",
        Promise.FAILED_SAMPLE,
        "services/rollout/results/finish.py",
        "shards.append(task_shards([sample.sequences for sample, _ in alive]) | ",
        "shards.append(task_shards([sample.sequences for sample in group]) | ",
        "tests/unit/rollout/test_assemble.py::test_failed_samples_are_left_out_and_counted",
    ),
    Mutation(
        "a reward that is not a number counts as a score",
        Promise.FAILED_SAMPLE,
        SCORE,
        '    if not abs(value) <= LIMIT:\n        return Score(None, f"returned',
        '    if abs(value) > LIMIT:\n        return Score(None, f"returned',
        f"{REWARDS}::test_the_result_of_a_function_becomes_one_number_or_a_failure",
    ),
]
