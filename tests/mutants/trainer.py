"""Lists defects in the trainer: token weights, losses, gradients across ranks, updates, checkpoints, the driver."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

WORKER = "services/policy_trainer/worker"
NUMBERS = "tests/unit/policy_trainer/test_numbers.py"
LOSSES = "tests/unit/policy_trainer/test_losses.py"
SNAPSHOTS = "tests/unit/policy_trainer/test_snapshots.py"
BEST = "tests/unit/policy_trainer/test_best.py"
STATE = "tests/unit/policy_trainer/test_state.py"
KERNELS = "tests/unit/shared/test_attention_kernels.py"
GRADIENTS = "tests/parity/test_gradients_torch.py"

TRAINER = [
    Mutation(
        "token_mean divides by the length of the longest sample instead of the number of tokens",
        "services/policy_trainer/token_weights.py",
        "filled / max(counts.sum(), 1.0)",
        "filled / max(counts.max(), 1.0)",
        f"{NUMBERS}::test_token_weights_follow_the_table",
    ),
    Mutation(
        "each rank divides by its own number of tokens",
        "shared/batch.py",
        "return [self.take(sorted(indices)) for indices in chunks]",
        "return [each.with_scalars({name: values * (count if name == 'weights' else 1) "
        "for name, values in each.scalars.items()}) for each in (self.take(sorted(indices)) for indices in chunks)]",
        "tests/unit/policy_trainer/test_slicing.py::test_samples_stay_with_their_tasks",
    ),
    Mutation(
        "truncated samples count in the denominator although they are masked",
        "services/policy_trainer/token_weights.py",
        'return np.where(scalars["truncated"] != 0, 0, tokens) if overlong == "mask" else tokens',
        "return tokens",
        f"{NUMBERS}::test_overlong_samples_are_masked_before_counting_except_in_the_sample_count_of_dr_grpo",
    ),
    Mutation(
        "log-probs are shifted by one token",
        "shared/model/tree.py",
        "token_node[np.flatnonzero(mask) - 1]",
        "token_node[np.flatnonzero(mask) - 2]",
        "tests/unit/shared/test_model_tree.py::test_every_masked_token_is_predicted_from_exactly_its_prefix",
    ),
    Mutation(
        "a masked token is scored",
        "shared/model/tree.py",
        "mask = np.asarray(loss_mask) != 0",
        "mask = np.arange(len(tokens)) != 0 if np.any(loss_mask) else np.asarray(loss_mask) != 0",
        "tests/unit/shared/test_model_logprobs.py",
    ),
    Mutation(
        "the clipped policy loss takes the larger gain",
        f"{WORKER}/losses/policy.py",
        "gain = torch.minimum(unclipped,",
        "gain = torch.maximum(unclipped,",
        f"{LOSSES}::test_value_and_gradient_agree_with_the_formula",
    ),
    Mutation(
        "the importance weight is not truncated",
        f"{WORKER}/losses/mismatch.py",
        "return weight.clamp(max=spec.tis_cap) if spec.tis_cap > 0 else weight",
        "return weight",
        f"{LOSSES}::test_importance_weight_is_truncated_at_the_cap",
    ),
    Mutation(
        "the importance weight is inverted",
        f"{WORKER}/losses/mismatch.py",
        "weight = ratio(prox - data.rollout)",
        "weight = ratio(data.rollout - prox)",
        "tests/unit/policy_trainer/test_loss_terms.py::test_loss_follows_the_stated_formula",
    ),
    Mutation(
        "GSPO counts only the tokens of its own context rank",
        f"{WORKER}/losses/tokens.py",
        "return self.add_up(values.new_zeros",
        "return _alone(values.new_zeros",
        f"{LOSSES}::test_gspo_includes_the_parts_of_a_sequence_on_other_ranks",
    ),
    Mutation(
        "an extreme log-ratio is not clamped",
        f"{WORKER}/losses/tokens.py",
        "log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()",
        "log_ratio.exp()",
        f"{LOSSES}::test_extreme_log_ratios_give_finite_gradients",
    ),
    Mutation(
        "an advantage is divided by the biased standard deviation",
        "services/policy_trainer/advantages.py",
        "np.sqrt(squares / np.maximum(counts - 1, 1))",
        "np.sqrt(squares / np.maximum(counts, 1))",
        "tests/unit/policy_trainer/test_advantages.py::test_grpo_divides_by_the_groups_own_deviation",
    ),
    Mutation(
        "with context parallelism, the second chunk sees all keys",
        "shared/model/context.py",
        "first, end = number * chunk, (number + 1) * chunk",
        "first, end = number * chunk, 2 * ranks.size * chunk",
        "tests/unit/shared/test_context_attention.py",
    ),
    Mutation(
        "gradients are averaged across data and context ranks",
        f"{WORKER}/shards.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(float(mesh.size()))",
        f"{GRADIENTS}::test_gradients_equal_those_of_one_process_and_one_micro_batch[dp2]",
    ),
    Mutation(
        "each context rank keeps its own part of a sequence's sums",
        f"{WORKER}/mesh.py",
        "        dist.all_reduce(total, group=self._context.group)\n",
        "",
        f"{GRADIENTS}::test_gradients_equal_those_of_one_process_and_one_micro_batch[cp2]",
    ),
    Mutation(
        "a micro-batch's gradient replaces the previous ones",
        f"{WORKER}/backend_torch.py",
        "            total.backward()",
        "            self.drop_gradients()\n            total.backward()",
        f"{GRADIENTS}::test_gradients_are_the_same_at_every_micro_batch_size",
    ),
    Mutation(
        "an update uses a gradient that is not finite",
        f"{WORKER}/backend_torch.py",
        "if not math.isfinite(grad_norm):",
        "if False:",
        f"{STATE}::test_a_non_finite_gradient_changes_neither_weights_nor_optimizer_state",
    ),
    Mutation(
        "the gradient of one update is carried over into the next",
        f"{WORKER}/backend_torch.py",
        "        self._trained.write_back()\n        self.drop_gradients()\n",
        "        self._trained.write_back()\n",
        f"{STATE}::test_training_from_a_checkpoint_ends_with_the_same_bits",
    ),
    Mutation(
        "a checkpoint leaves out the optimizer's moments",
        f"{WORKER}/backend_torch.py",
        'for slot in ("exp_avg", "exp_avg_sq"):',
        'for slot in ("exp_avg",):',
        f"{STATE}::test_training_from_a_checkpoint_ends_with_the_same_bits",
    ),
    Mutation(
        "a reward that is not a number is trained on",
        "services/policy_trainer/batch_checks.py",
        "wrong = ~np.isfinite(values)",
        "wrong = np.isinf(values)",
        f"{NUMBERS}::test_a_non_finite_number_is_refused_and_its_task_is_named",
    ),
    Mutation(
        "an update runs while parts of its state are on the host",
        f"{WORKER}/colocation/residency.py",
        "messages.OptimStep: PARTS,",
        "messages.OptimStep: _PARAMETERS,",
        "tests/integration/policy_trainer/test_trainer_group.py::test_offload_between_gradient_and_update_does_not_change_a_bit",
    ),
    Mutation(
        "nodes that only pad a batch are attended to in packed chains",
        "shared/model/attention.py",
        "slots, nodes = np.unique(batch.scatter, return_index=True)",
        "slots, nodes = np.sort(batch.scatter), np.argsort(batch.scatter, kind='stable')",
        f"{KERNELS}::test_packed_chains_described_to_the_kernel_give_the_results_of_padded_ones",
    ),
    Mutation(
        "a sliding window is one token too long in packed chains",
        "shared/model/attention.py",
        "-1 if window is None else window - 1",
        "-1 if window is None else window",
        f"{KERNELS}::test_packed_chains_described_to_the_kernel_give_the_results_of_padded_ones",
    ),
    Mutation(
        "packed chains are taken for the whole micro-batch although nodes pad it",
        "shared/model/attention.py",
        "return end == len(self.scatter)",
        "return True",
        f"{KERNELS}::test_packed_chains_described_to_the_kernel_give_the_results_of_padded_ones",
    ),
    Mutation(
        "float32 chains on a GPU store the scores of all pairs",
        "shared/model/attention.py",
        "flash=mask is None and _suits_flash(query, value)",
        "flash=mask is None",
        f"{KERNELS}::test_keys_are_repeated_only_on_a_gpu_and_only_where_flash_attention_does_not_accept_the_inputs",
    ),
    Mutation(
        "a GPU computes digests with a product that cuBLAS lacks",
        "shared/weights/digests.py",
        'return v if device.type == "cpu" else v.t().contiguous().t()',
        "return v",
        "tests/unit/shared/test_digests.py::test_the_product_accepts_the_layout_that_gpus_need",
    ),
    Mutation(
        "engines cannot copy the weights once the optimizer leaves the device",
        f"{WORKER}/colocation/devices.py",
        'if "parameters" in own or not self._shows_parameters:',
        "if own:",
        "tests/unit/shared/test_turns.py::test_engines_that_read_the_parameters_may_copy_them_until_they_leave_the_device",
    ),
    Mutation(
        "memory exported for the parts of a version is kept forever if the engine does not ask for the next one",
        f"{WORKER}/weights/transfers.py",
        "(now + self.deadline_s if event.more else None), event.more",
        "None, event.more",
        "tests/unit/policy_trainer/test_weights_sender.py"
        "::test_an_engine_that_does_not_ask_for_the_next_part_in_time_loses_its_communicator",
    ),
    Mutation(
        "every part of a version is exported anew",
        f"{WORKER}/weights/channels.py",
        "if self._copy is None or not offer.first:",
        "if True:",
        "tests/unit/policy_trainer/test_weights_channels.py"
        "::test_all_parts_of_a_version_take_turns_in_memory_that_is_exported_once",
    ),
    Mutation(
        "a load that breaks off between two parts does not tell the engine",
        "services/rollout/weights/transfer.py",
        "broken_off = receiver.broken_off(why)",
        "broken_off = TransferFailed(why)",
        "tests/unit/rollout/test_transfers_asked.py"
        "::test_a_load_that_is_cancelled_between_two_parts_leaves_the_receiver_without_a_version",
    ),
    Mutation(
        "oneDNN keeps a kernel for every number of rows",
        "shared/model/cpu.py",
        "os.putenv(name, _CACHED_KERNELS)",
        "str(name)",
        "tests/unit/shared/test_linear.py::test_kernels_for_many_numbers_of_rows_take_a_bounded_amount_of_memory",
    ),
    Mutation(
        "oneDNN computes on a CPU for which MKL is faster",
        "shared/model/linear.py",
        "        USES_ONEDNN\n        and multiplications",
        "        multiplications",
        "tests/unit/shared/test_linear.py::test_intels_cpus_use_mkl",
    ),
    Mutation(
        "the plain decoder turns gradients of queries and keys the wrong way",
        "shared/model/plain_training.py",
        "sin_N1D[rows], value=-1, out=qk_RXD",
        "sin_N1D[rows], out=qk_RXD",
        "tests/unit/shared/test_plain_training.py::test_values_and_gradients_equal_those_of_the_models_own_modules",
    ),
    Mutation(
        "the plain decoder forgets the second residual connection in the backward pass",
        "shared/model/plain_training.py",
        "at.add_(grad[rows])",
        "at.add_(0.0)",
        "tests/unit/shared/test_plain_training.py::test_values_and_gradients_equal_those_of_the_models_own_modules",
    ),
    Mutation(
        "a pass without gradients computes other bits than one with gradients",
        "shared/model/logprobs.py",
        "    if trains_plainly(model):",
        "    if torch.is_grad_enabled() and trains_plainly(model):",
        "tests/unit/shared/test_plain_training.py::test_values_and_gradients_equal_those_of_the_models_own_modules",
    ),
    Mutation(
        "progress is counted only if the model itself is called",
        "services/policy_trainer/worker/backend_torch.py",
        "return self._trained.scorer",
        "return self._trained.model",
        "tests/unit/policy_trainer/test_host_waits.py::test_progress_is_counted_for_every_micro_batch",
    ),
    Mutation(
        "padding slots take part in the plain decoder's gradients",
        "shared/model/attention.py",
        "return grad.index_select(0, scatter), None, None",
        "return grad[: len(scatter)].clone(), None, None",
        "tests/unit/shared/test_plain_training.py::test_values_and_gradients_equal_those_of_the_models_own_modules",
    ),
    Mutation(
        "the plain decoder trains a model whose layers are to be recomputed",
        "shared/model/plain_training.py",
        '"forward" not in vars(layer)\n        and ',
        "",
        "tests/unit/shared/test_plain_training.py::test_only_whole_plain_models_that_are_trained_as_they_are_use_it",
    ),
    Mutation(
        "a bias that is not contiguous is read as if it were",
        "shared/model/linear.py",
        "_is_plain(bias) and bias.is_contiguous() and",
        "_is_plain(bias) and",
        "tests/unit/shared/test_linear.py::test_only_contiguous_weights_and_biases_of_the_usual_shapes_suit_onednn",
    ),
    Mutation(
        "a call from an older driver is executed",
        f"{WORKER}/call_queue.py",
        "if request.driver != self.driver:",
        "if False:",
        f"{STATE}::test_a_worker_refuses_an_older_driver_and_an_unknown_one",
    ),
    Mutation(
        "a checkpoint is visible before it is written",
        f"{WORKER}/checkpoint.py",
        'partial = folder / f".{target.name}{_PARTIAL}"',
        "partial = target",
        "tests/unit/policy_trainer/test_checkpoint_interrupted.py",
    ),
    Mutation(
        "a checkpoint whose checksum is wrong is loaded",
        "shared/checkpoint_files.py",
        "if found[name] != expected.get(name):",
        "if False:",
        f"{STATE}::test_a_damaged_checkpoint_is_refused_with_a_one_line_error",
    ),
    Mutation(
        "the last of several equally good checkpoints counts as the best",
        "services/policy_trainer/best.py",
        "rank > self._rank",
        "rank >= self._rank",
        f"{BEST}::test_the_best_checkpoint_is_kept_beside_the_newest_and_the_earliest_among_equals_is_exported",
    ),
    Mutation(
        "a checkpoint is not kept while its evaluation is under way",
        "services/policy_trainer/best.py",
        "{*self.undecided, *([] if",
        "{*([] if",
        f"{BEST}::test_the_best_checkpoint_is_kept_beside_the_newest_and_the_earliest_among_equals_is_exported",
    ),
    Mutation(
        "the effective sample size is that of the weights before their truncation",
        f"{WORKER}/losses/mismatch.py",
        '"weight_squared": truncated.square().sum()',
        '"weight_squared": weight.square().sum()',
        "tests/unit/policy_trainer/test_losses.py::test_metrics_of_importance_weights_follow_their_formulas",
    ),
    Mutation(
        "the last checkpoint is deleted before the new one is complete",
        f"{WORKER}/checkpoint.py",
        "_exchange(partial, target)  #",
        "(shutil.rmtree(target), partial.rename(target))  #",
        "tests/unit/policy_trainer/test_checkpoint_interrupted.py",
    ),
    Mutation(
        "a rank returns to a newer snapshot than another rank",
        "services/policy_trainer/dispatch.py",
        "if all(snapshot in state.snapshots for state in states)]",
        "if snapshot]",
        "tests/unit/policy_trainer/test_dispatch_orders.py::test_a_snapshot_counts_only_if_every_rank_holds_it",
    ),
    Mutation(
        "a snapshot without its seal is used",
        f"{WORKER}/snapshots.py",
        "        _clear(target)\n",
        "",
        f"{SNAPSHOTS}::test_an_interrupted_write_leaves_the_other_snapshot_intact",
    ),
    Mutation(
        "a damaged snapshot is loaded",
        f"{WORKER}/snapshots.py",
        "if xxhash.xxh3_64_intdigest(data.data) != shard.checksum:",
        "if False:",
        f"{SNAPSHOTS}::test_every_flipped_byte_is_detected",
    ),
    Mutation(
        "the next snapshot replaces the one that was loaded",
        f"{WORKER}/snapshots.py",
        "                self._newest = file\n            elif",
        "                pass\n            elif",
        f"{SNAPSHOTS}::test_the_snapshot_that_was_loaded_is_not_overwritten",
    ),
    Mutation(
        "a snapshot of a step that was rolled back is loaded",
        "services/policy_trainer/resume.py",
        " if snapshot.lineage == info.lineage]",
        "]",
        f"{STATE}::test_a_run_that_went_back_to_a_checkpoint_uses_no_snapshot_of_the_steps_rolled_back",
    ),
    Mutation(
        "a snapshot of a step that was never committed is loaded",
        "services/policy_trainer/resume.py",
        " if step <= info.committed_step]\n    if info.reference_step",
        "]\n    if info.reference_step",
        f"{STATE}::test_without_a_snapshot_of_the_committed_step_an_earlier_state_is_loaded_under_a_new_lineage",
    ),
    Mutation(
        "the driver publishes weights before it commits their step",
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
