"""Lists defects in the trainer: token weights, losses, gradients across ranks, updates, checkpoints, the driver."""

from __future__ import annotations

from tests.mutants.mutation import Mutation
from tests.mutants.promises import Promise

WORKER = "services/policy_trainer/worker"
NUMBERS = "tests/unit/policy_trainer/test_numbers.py"
LOSSES = "tests/unit/policy_trainer/test_losses.py"
SNAPSHOTS = "tests/unit/policy_trainer/test_snapshots.py"
STATE = "tests/unit/policy_trainer/test_state.py"
GRADIENTS = "tests/parity/test_gradients_torch.py"

TRAINER = [
    Mutation(
        "each rank divides by its own number of tokens",
        Promise.SPLITS,
        "shared/batch.py",
        "return [self.take(sorted(indices)) for indices in chunks]",
        "return [each.with_scalars({name: values * (count if name == 'weights' else 1) "
        "for name, values in each.scalars.items()}) for each in (self.take(sorted(indices)) for indices in chunks)]",
        "tests/unit/policy_trainer/test_slicing.py::test_samples_stay_with_their_tasks",
    ),
    Mutation(
        "log-probs are shifted by one token",
        Promise.LOSS,
        "shared/model/tree.py",
        "GivenTargets(scored - 1, tokens[scored])",
        "GivenTargets(np.maximum(scored - 2, 0), tokens[scored])",
        "tests/unit/shared/test_model_tree.py::test_every_masked_token_is_predicted_from_exactly_its_prefix",
    ),
    Mutation(
        "the clipped policy loss takes the larger gain",
        Promise.LOSS,
        f"{WORKER}/losses/policy.py",
        "gain = torch.minimum(unclipped,",
        "gain = torch.maximum(unclipped,",
        f"{LOSSES}::test_value_and_gradient_agree_with_the_formula",
    ),
    Mutation(
        "the importance weight is not truncated",
        Promise.LOSS,
        f"{WORKER}/losses/divergence.py",
        "return weight.clamp(max=spec.tis_cap) if spec.tis_cap > 0 else weight",
        "return weight",
        f"{LOSSES}::test_importance_weight_is_truncated_at_the_cap",
    ),
    Mutation(
        "GSPO counts only the tokens of its own context rank",
        Promise.SPLITS,
        f"{WORKER}/losses/tokens.py",
        "return self.add_up(values.new_zeros",
        "return _alone(values.new_zeros",
        f"{LOSSES}::test_gspo_includes_the_parts_of_a_sequence_on_other_ranks",
    ),
    Mutation(
        "with context parallelism, the second chunk sees all keys",
        Promise.SPLITS,
        "shared/model/context.py",
        "first, end = number * chunk, (number + 1) * chunk",
        "first, end = number * chunk, 2 * ranks.size * chunk",
        "tests/unit/shared/test_context_attention.py",
    ),
    Mutation(
        "gradients are averaged across data and context ranks",
        Promise.SPLITS,
        f"{WORKER}/shards.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(float(mesh.size()))",
        f"{GRADIENTS}::test_gradients_equal_those_of_one_process_and_one_micro_batch[dp2]",
    ),
    Mutation(
        "a micro-batch's gradient replaces the previous ones",
        Promise.SPLITS,
        f"{WORKER}/backend_torch.py",
        "            total.backward()",
        "            self.drop_gradients()\n            total.backward()",
        f"{GRADIENTS}::test_gradients_are_the_same_at_every_micro_batch_size",
    ),
    Mutation(
        "the gradient of one update is carried over into the next",
        Promise.SAME_BITS,
        f"{WORKER}/backend_torch.py",
        "        self._trained.write_back()\n        self.drop_gradients()\n",
        "        self._trained.write_back()\n",
        f"{STATE}::test_training_from_a_checkpoint_ends_with_the_same_bits",
    ),
    Mutation(
        "a checkpoint leaves out the optimizer's moments",
        Promise.SAME_BITS,
        f"{WORKER}/backend_torch.py",
        'for slot in ("exp_avg", "exp_avg_sq"):',
        'for slot in ("exp_avg",):',
        f"{STATE}::test_training_from_a_checkpoint_ends_with_the_same_bits",
    ),
    Mutation(
        "a reward that is not a number is trained on",
        Promise.FAILED_SAMPLE,
        "services/policy_trainer/bad_data.py",
        "wrong = ~np.isfinite(values)",
        "wrong = np.isinf(values)",
        f"{NUMBERS}::test_a_non_finite_number_is_refused_and_its_task_is_named",
    ),
    Mutation(
        "an update runs while parts of its state are on the host",
        Promise.SAME_BITS,
        f"{WORKER}/devices.py",
        "messages.OptimStep: PARTS,",
        "messages.OptimStep: _PARAMETERS,",
        "tests/integration/policy_trainer/test_trainer_group.py::test_offload_between_gradient_and_update_does_not_change_a_bit",
    ),
    Mutation(
        "progress is counted only if the model itself is called",
        Promise.DEADLINES,
        "services/policy_trainer/worker/backend_torch.py",
        "return self._trained.scorer",
        "return self._trained.model",
        "tests/unit/policy_trainer/test_host_waits.py::test_progress_is_counted_for_every_micro_batch",
    ),
    Mutation(
        "the plain decoder computes a model without its adapter",
        Promise.SYNCED,
        "shared/model/plain_decoder.py",
        "and all(_is_own(module, type(model).__module__) for module in model.modules())",
        "",
        "tests/unit/rollout/test_plain_decoder.py::test_a_layer_that_an_adapter_wraps_is_not_left_out",
    ),
    Mutation(
        "a call from an older driver is executed",
        Promise.ONCE,
        f"{WORKER}/call_queue.py",
        "if request.driver != self.driver:",
        "if False:",
        f"{STATE}::test_a_worker_refuses_an_older_driver_and_an_unknown_one",
    ),
    Mutation(
        "a checkpoint is visible before it is written",
        Promise.KILLED,
        f"{WORKER}/checkpoint.py",
        'partial = target.with_name(f".{target.name}{_PARTIAL}")',
        "partial = target",
        "tests/unit/policy_trainer/test_checkpoint_interrupted.py",
    ),
    Mutation(
        "a checkpoint whose checksum is wrong is loaded",
        Promise.KILLED,
        "shared/checkpoint_files.py",
        "if found[name] != expected.get(name):",
        "if False:",
        f"{STATE}::test_a_damaged_checkpoint_is_refused_with_a_one_line_error",
    ),
    Mutation(
        "the last checkpoint is deleted before the new one is complete",
        Promise.KILLED,
        f"{WORKER}/checkpoint.py",
        "_exchange(partial, target)  #",
        "(shutil.rmtree(target), partial.rename(target))  #",
        "tests/unit/policy_trainer/test_checkpoint_interrupted.py",
    ),
    Mutation(
        "a rank returns to a newer snapshot than another rank",
        Promise.SAME_BITS,
        "services/policy_trainer/dispatch.py",
        "if all(snapshot in state.snapshots for state in states)]",
        "if snapshot]",
        "tests/unit/policy_trainer/test_dispatch_orders.py::test_a_snapshot_counts_only_if_every_rank_holds_it",
    ),
    Mutation(
        "a snapshot without its seal is used",
        Promise.KILLED,
        f"{WORKER}/snapshots.py",
        "        _clear(target)\n",
        "",
        f"{SNAPSHOTS}::test_an_interrupted_write_leaves_the_other_snapshot_intact",
    ),
    Mutation(
        "a damaged snapshot is loaded",
        Promise.SAME_BITS,
        f"{WORKER}/snapshots.py",
        "if xxhash.xxh3_64_intdigest(data.data) != shard.checksum:",
        "if False:",
        f"{SNAPSHOTS}::test_every_flipped_byte_is_detected",
    ),
    Mutation(
        "a snapshot of a step that was rolled back is loaded",
        Promise.SAME_BITS,
        "services/policy_trainer/resume.py",
        " if snapshot.lineage == info.lineage]",
        "]",
        f"{STATE}::test_a_run_that_went_back_to_a_checkpoint_uses_no_snapshot_of_the_steps_rolled_back",
    ),
    Mutation(
        "the driver publishes weights before it commits their step",
        Promise.ONCE,
        "services/policy_trainer/driver.py",
        """\
            await self.scheduler.commit(version, row)
            self.on_row(row)
""",
        """\
            self.publisher.begin(version, checkpoint_now=batch.checkpoint_now)
            await self.scheduler.commit(version, row)
            self.on_row(row)
""",
        "tests/unit/policy_trainer/test_driver_order.py::test_a_step_is_committed_before_its_weights_are_published_or_saved",
    ),
]
