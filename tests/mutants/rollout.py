"""Lists defects in rollout and weight syncs: versions, verification of weights, and samples."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

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
        SYNC,
        "        error = await self._prove(ref.drill, ref.drill.tolerance",
        "        self._drilled.add(loaded.entry)\n        error = await self._prove(ref.drill, ref.drill.tolerance",
        f"{WEIGHTS}::test_an_entry_counts_as_drilled_only_after_the_canary_of_the_drill_matched",
    ),
    Mutation(
        "the start-up drill is left out",
        SYNC,
        "            await self._drill(coming.ref, entry)\n",
        "            self._drilled.add(entry)\n",
        f"{WEIGHTS}::test_an_update_that_never_reaches_one_parameter_fails_the_drill",
    ),
    Mutation(
        "a version counts as held before its canary has matched",
        SYNC,
        "        error = await self._prove(ref.canary, self._tolerance",
        "        self.holds = Version(ref.lineage, ref.step)\n"
        "        error = await self._prove(ref.canary, self._tolerance",
        f"{WEIGHTS}::test_an_engine_with_the_right_weights_and_a_wrong_computation_fails_the_canary",
    ),
    Mutation(
        "the engine's weights are not compared with those it was given",
        SYNC,
        "            await self._engine.verify(loaded.given, announced)\n",
        "            pass\n",
        f"{WEIGHTS}::test_a_version_that_differs_from_the_announced_one_by_a_bit_is_refused",
    ),
    Mutation(
        "the canary's tolerance is a thousand times wider",
        "services/policy_trainer/worker/weights/publish.py",
        "\nTOLERANCE = 1e-4\n",
        "\nTOLERANCE = 0.1\n",
        f"{WEIGHTS}::test_production_tolerances_have_fixed_values",
    ),
    Mutation(
        "a canary that is NaN passes",
        SYNC,
        "        if not error <= tolerance:",
        "        if error > tolerance:",
        f"{WEIGHTS}::test_a_nan_in_the_trainers_canary_is_a_mismatch",
    ),
    Mutation(
        "an engine behind its lease samples with its old version",
        SYNC,
        "return version != wanted if exact else version < wanted",
        "return version != wanted if exact else False",
        f"{WEIGHTS}::test_an_engine_loads_newer_versions_and_the_exact_one_that_is_requested",
    ),
    Mutation(
        "an engine ahead of an exact lease samples with its newer version",
        SYNC,
        "return version != wanted if exact else version < wanted",
        "return version < wanted",
        f"{WEIGHTS}::test_an_engine_loads_newer_versions_and_the_exact_one_that_is_requested",
    ),
    Mutation(
        "an update with parameters that the engine does not have is accepted",
        "shared/weights/weight_set.py",
        "if missing or unexpected:",
        "if False:",
        f"{WEIGHTS}::test_missing_and_unexpected_parameters_are_reported_and_no_weight_changes",
    ),
    Mutation(
        "a parameter of a different type or shape is accepted",
        "shared/weights/weight_set.py",
        "if other != parameter:",
        "if False:",
        f"{WEIGHTS}::test_a_parameter_of_the_wrong_shape_is_reported",
    ),
    Mutation(
        "a token of unverified weights gets a version",
        TRAJECTORY,
        "if (counts[at] != swaps).any():",
        "if False:",
        f"{VERSIONS}::test_no_token_is_sampled_with_weights_that_fail_verification",
    ),
    Mutation(
        "the drill does not change parameters that are zero",
        "shared/weights/drill.py",
        "RELATIVE_SCALE * mean if mean > 0 else ZERO_SCALE",
        "RELATIVE_SCALE * mean",
        "tests/unit/shared/test_drill.py::test_a_parameter_of_zeros_also_changes",
    ),
    Mutation(
        "the prompt is trained on",
        TRAJECTORY,
        "not_sampled, no_logprobs = np.zeros(given, np.uint8)",
        "not_sampled, no_logprobs = np.ones(given, np.uint8)",
        SHARDS,
    ),
    Mutation(
        "the last token, which ends the answer, is not trained on",
        TRAJECTORY,
        "np.ones(len(answer.token_ids), np.uint8)",
        "np.arange(len(answer.token_ids)) < len(answer.token_ids) - 1",
        SHARDS,
    ),
    Mutation(
        "log-probs are attributed to the previous token",
        TRAJECTORY,
        "np.concatenate((no_logprobs, answer.logprobs))",
        "np.roll(np.concatenate((no_logprobs, answer.logprobs)), -1)",
        SHARDS,
    ),
    Mutation(
        "every sample gets the versions of the first one",
        TRAJECTORY,
        "steps[end - len(counts) : end]",
        "steps[: len(counts)]",
        "tests/unit/rollout/test_in_flight.py::test_every_token_carries_the_version_that_sampled_it",
    ),
    Mutation(
        "tokens of the prompt count for a sample's oldest version",
        "services/rollout/results/assemble.py",
        "np.where(mask == 1, versions, _NEWEST)",
        "versions",
        "tests/unit/rollout/test_assemble.py",
    ),
    Mutation(
        "a failed sample is trained on",
        "services/rollout/results/assemble.py",
        "made = task_shards([sample for sample, _ in alive])",
        "made = task_shards(group)",
        "tests/unit/rollout/test_assemble.py::test_failed_samples_are_left_out_and_counted",
    ),
    Mutation(
        "a reward that is not a number counts as a score",
        SCORE,
        '    if not abs(value) <= LIMIT:\n        return Score(None, f"returned',
        '    if abs(value) > LIMIT:\n        return Score(None, f"returned',
        f"{REWARDS}::test_the_result_of_a_function_becomes_one_number_or_a_failure",
    ),
    Mutation(
        "rewards are added up without their weights",
        SCORE,
        "value += weight * score.value",
        "value += score.value",
        f"{REWARDS}::test_terms_are_summed_by_weight",
    ),
]
