"""Every key in the topology has an effect or is refused. Either changing the key changes the launcher's processes, the
scheduler's plan or the sampling of a task, or a named test shows the key's effect, and the product reads the key at the
place named here. A new schema key must be added here.
"""

from __future__ import annotations

import ast
import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file

from launch.processes.plan import SUPERVISOR, listen_endpoint, threads_of, visible_gpus
from proto.messages import BatchMeta, LeaseGrant
from services.policy_trainer.worker.backend import BackendOptions
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.rollout.rewards.pool import RewardPool
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.tasks import TaskSets
from services.scheduler.planning import configuration, device_limits, make_plan
from shared.ranks.layout import Layout
from shared.sample import Sample
from shared.stages import TRAIN
from shared.topology import Topology, TopologyError, load
from shared.topology.capacity import parameter_counts
from shared.topology.fields import Section
from shared.topology.memory_plan import per_process
from shared.topology.passes import FASTEST
from shared.topology.reward import Reward
from shared.topology.service_checks import UNSUPPORTED
from tests.parity.gradient_cases import back, cases
from tests.unit.policy_trainer.test_algorithm_keys import CHANGES as ALGORITHM
from tests.unit.policy_trainer.training import adamw
from tests.unit.shared.topology.small_topology import BASE, make, write
from tests.unit.tiny_models import make_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]

HOSTS = ("placement.hosts={a: {}, b: {}}", "transport.listen=10.0.0.1")
CRITIC = ("critic={optimizer: {lr: 1.0e-3}}", "algorithm.advantage={name: gae}")
LORA = ("policy.lora={rank: 8}",)
TEACHER = ("teacher={model: ./model}", "algorithm.distill={}")
REWARD_MODEL = ("reward.function=builtin:reward_model", "reward_model={model: ./model}")
MEGATRON = (*CRITIC, "services.critic={backend: megatron}")
MIXTURE = "policy.model=./mixture"
EXPERTS = (*MEGATRON, "critic.model=./mixture")
FROZEN: dict[str, tuple[str, ...]] = {
    "services.reference.gpus": ("services.reference.gpus=1",),
    "services.reference.threads": ("services.reference.threads=2",),
    "services.reference.parallel.tp": ("services.reference={backend: megatron, parallel: {tp: 2}}",),
    "services.reference.parallel.pp": ("services.reference={backend: megatron, parallel: {pp: 2}}",),
    "services.reference.parallel.cp": ("services.reference={backend: megatron, parallel: {cp: 2}}",),
    "services.reference.host": (*HOSTS, "services.reference.host=a"),
}
SOURCES = "data.train={sources: {a: {source: builtin:addition}, b: {source: jsonl:rows.jsonl}}, max_prompt_tokens: 32}"
OBSERVED: dict[str, tuple[str, ...]] = {
    "run.name": ("run.name=other",),
    "run.steps": ("run.steps=4",),
    "run.evaluate": ("run.evaluate=true",),
    "run.seed": ("run.seed=5",),
    "run.deterministic": ("run.deterministic=true",),
    "policy.model": ("policy.model=./larger",),
    "policy.dtype": ("policy.dtype=float32",),
    "policy.lora.rank": ("policy.lora.rank=16",),
    "policy.lora.target_modules": (*LORA, "policy.lora.target_modules=[q_proj]"),
    "policy.lora.exclude_modules": (*LORA, "policy.lora.exclude_modules=[q_proj]"),
    "data.train.source": ("data.train.source=builtin:addition",),
    "data.train.sources.*.source": (SOURCES, "data.train.sources.a.source=builtin:addition?split=test"),
    "data.train.sources.*.weight": (SOURCES, "data.train.sources.a.weight=[[1, 1.0], [9, 0.25]]"),
    "data.train.max_prompt_tokens": ("data.train.max_prompt_tokens=31",),
    "data.train.shuffle": ("data.train.shuffle=false",),
    "data.eval.*.source": ("data.eval.held.source=jsonl:rows.jsonl",),
    "data.eval.*.every": ("data.eval.held.every=7",),
    "data.eval.*.samples": ("data.eval.held={source: builtin:addition, every: 5, temperature: 0.5, samples: 3}",),
    "data.eval.*.temperature": ("data.eval.held.temperature=0.5",),
    "data.eval.*.max_new_tokens": ("data.eval.held.max_new_tokens=5",),
    "data.eval.*.rows": ("data.eval.held.rows=2",),
    "sampling.temperature": ("sampling.temperature=0.7",),
    "sampling.max_new_tokens": ("sampling.max_new_tokens=7",),
    "sampling.stop": ("sampling.stop=END",),
    "staleness": ("staleness=0",),
    "consume": ("consume=completion",),
    "services.policy-trainer.gpus": ("services.policy-trainer.gpus=1",),
    "services.policy-trainer.threads": ("services.policy-trainer.threads=2",),
    "services.policy-trainer.parallel.tp": ("services.policy-trainer={backend: megatron, parallel: {tp: 2}}",),
    "services.policy-trainer.parallel.pp": ("services.policy-trainer={backend: megatron, parallel: {pp: 2}}",),
    "services.policy-trainer.parallel.cp": ("services.policy-trainer.parallel.cp=2",),
    "services.policy-trainer.parallel.ep": (MIXTURE, "services.policy-trainer={backend: megatron, parallel: {ep: 2}}"),
    "services.policy-trainer.workers": ("services.policy-trainer.workers=2",),
    "critic.model": (*CRITIC, "critic.model=./larger"),
    "critic.dtype": (*CRITIC, "critic.dtype=float32"),
    "teacher.model": (*TEACHER, "teacher.model=./larger"),
    "teacher.dtype": (*TEACHER, "teacher.dtype=float32"),
    "reward.model": ("reward={function: builtin:reward_model, model: ./model}",),
    "reward_model.model": (*REWARD_MODEL, "reward_model.model=./larger"),
    "reward_model.dtype": (*REWARD_MODEL, "reward_model.dtype=float32"),
    "reward_model.max_tokens": (*REWARD_MODEL, "reward_model.max_tokens=9"),
    "services.critic.gpus": (*CRITIC, "services.critic.gpus=1"),
    "services.critic.threads": (*CRITIC, "services.critic.threads=2"),
    "services.critic.parallel.tp": (*MEGATRON, "services.critic.parallel.tp=2"),
    "services.critic.parallel.pp": (*MEGATRON, "services.critic.parallel.pp=2"),
    "services.critic.parallel.cp": (*CRITIC, "services.critic.parallel.cp=2"),
    "services.critic.parallel.ep": (*EXPERTS, "services.critic.parallel.ep=2"),
    "services.critic.workers": (*CRITIC, "services.critic.workers=2"),
    **FROZEN,
    **{
        key.replace("reference", "teacher"): (*TEACHER, *(value.replace("reference", "teacher") for value in given))
        for key, given in FROZEN.items()
    },
    **{
        key.replace("reference", "reward-model"): (
            *REWARD_MODEL,
            *(value.replace("reference", "reward-model") for value in given),
        )
        for key, given in FROZEN.items()
    },
    "services.rollout.gpus": ("services.rollout.gpus=1",),
    "services.rollout.threads": ("services.rollout.threads=2",),
    "services.rollout.instances": ("services.rollout.instances=3",),
    "services.rollout.block_tasks": ("services.rollout.block_tasks=2",),
    "monitor.samples.every": ("monitor.samples.every=3",),
    "monitor.samples.per_step": ("monitor.samples.per_step=2",),
    "checkpoint.keep_last": ("checkpoint.keep_last=3",),
    "gc.after": ("gc.after=commit",),
    "services.policy-trainer.host": (*HOSTS, "services.policy-trainer.host=a"),
    "services.critic.host": (
        *CRITIC,
        *HOSTS,
        "services.policy-trainer={workers: 2, host: a}",
        "services.critic.host=[a, b]",
    ),
    "services.rollout.host": (*HOSTS, "services.rollout.host=[a, b]"),
    "placement.colocate": ("placement.colocate=[policy-trainer, reference]",),
    "lease.attempts": ("lease.attempts=4",),
    "transport.listen": ("transport.listen=10.0.0.1",),
    "transport.scheduler_port": ("transport={listen: 10.0.0.1, scheduler_port: 7000}",),
    "transport.supervisor_port": ("transport={listen: 10.0.0.1, supervisor_port: 7000}",),
    "transport.monitor_port": ("transport={listen: 10.0.0.1, monitor_port: 7000}",),
}
BESIDE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((key for key in OBSERVED if "critic" in key), CRITIC),
    **dict.fromkeys((key for key in OBSERVED if "lora" in key), LORA),
    **dict.fromkeys((key for key in OBSERVED if "teacher" in key), TEACHER),
    **dict.fromkeys((key for key in OBSERVED if "reward-model" in key or "reward_model." in key), REWARD_MODEL),
    "services.critic.host": (*CRITIC, *HOSTS, "services.policy-trainer={workers: 2, host: a}"),
    "services.critic.parallel.tp": MEGATRON,
    "services.critic.parallel.pp": MEGATRON,
    "services.critic.parallel.ep": EXPERTS,
    "services.policy-trainer.host": HOSTS,
    "services.reference.host": HOSTS,
    "services.teacher.host": (*TEACHER, *HOSTS),
    "services.reward-model.host": (*REWARD_MODEL, *HOSTS),
    "services.rollout.host": HOSTS,
    "transport.scheduler_port": ("transport={listen: 10.0.0.1}",),
    "transport.supervisor_port": ("transport={listen: 10.0.0.1}",),
    "transport.monitor_port": ("transport={listen: 10.0.0.1}",),
    "services.policy-trainer.parallel.tp": ("services.policy-trainer={backend: megatron}",),
    "services.policy-trainer.parallel.pp": ("services.policy-trainer={backend: megatron}",),
    "services.policy-trainer.parallel.ep": (MIXTURE, "services.policy-trainer={backend: megatron}"),
    **{
        f"services.reference.parallel.{name}": ("services.reference={backend: megatron}",)
        for name in ("tp", "pp", "cp")
    },
    **{
        f"services.teacher.parallel.{name}": (*TEACHER, "services.teacher={backend: megatron}")
        for name in ("tp", "pp", "cp")
    },
    **{
        f"services.reward-model.parallel.{name}": (*REWARD_MODEL, "services.reward-model={backend: megatron}")
        for name in ("tp", "pp", "cp")
    },
    "data.eval.*.samples": ("data.eval.held={source: builtin:addition, every: 5, temperature: 0.5}",),
    "data.train.sources.*.source": (SOURCES,),
    "data.train.sources.*.weight": (SOURCES,),
}
"""Settings that both topologies have in addition to BASE, by the key that is changed."""

REFUSED = {
    "services.rollout.parallel.pp": "services.rollout.parallel.pp=2",
    "services.rollout.parallel.cp": "services.rollout.parallel.cp=2",
}

SCHEDULE = ("schedule", "min_lr", "decay_steps")
OPTIMIZER: dict[str, object] = {
    "lr": 2e-3,
    "betas": (0.5, 0.9),
    "eps": 1e-2,
    "weight_decay": 0.5,
    "clip_norm": 1e-3,
    "warmup_steps": 10,
}
REWARD: dict[str, str] = {
    "reward.function": "{function: builtin:numeric}",
    "reward.params": "{function: builtin:numeric, params: {tolerance: 5}}",
    "reward.functions.*.function": "{functions: [{function: builtin:numeric}]}",
    "reward.functions.*.weight": "{functions: [{function: builtin:exact_match, weight: 3.0}]}",
    "reward.functions.*.params": "{functions: [{function: builtin:numeric, params: {tolerance: 5}}]}",
}
NUMERIC = {
    "reward.params": "{function: builtin:numeric}",
    "reward.functions.*.params": "{functions: [{function: builtin:numeric}]}",
}
"""Reward settings before the change, by the key that is changed, where they differ from the exact_match of BASE."""

TRAINER, ROLLOUT = "services/policy_trainer", "services/rollout/service.py"
EXPORTER = "services/exporter/server.py"
ELSEWHERE: dict[str, tuple[str, str, str]] = {
    "run.start_limit_s": (
        "launch/cluster.py",
        "topology.run.start_limit_s",
        "unit/launch/test_supervisor_server.py::test_a_service_that_is_not_ready_in_time_is_killed_and_started_again",
    ),
    "run.spares": (
        "launch/spares/processes.py",
        "topology.run.spares",
        "integration/launch/test_spares.py::test_no_spare_is_kept_if_spares_are_disabled",
    ),
    "monitor.web.listen": (
        "services/web/service.py",
        "web.listen",
        "integration/web/test_web_service.py::test_page_of_a_live_run_needs_the_token",
    ),
    "monitor.web.token": (
        "services/web/service.py",
        "web.token",
        "integration/web/test_web_service.py::test_page_of_a_live_run_needs_the_token",
    ),
    "monitor.web.operator_token": (
        "services/web/service.py",
        "web.operator_token",
        "integration/web/test_web_service.py::test_an_operator_restarts_a_service_from_the_page",
    ),
    **{
        f"monitor.{key}": (
            f"services/tracker/exporters/to_{key.partition('.')[0]}.py",
            f"section.{key.partition('.')[2]}",
            f"integration/tracker/test_tracker_keys.py::{test}",
        )
        for key, test in {
            "wandb.project": "test_wandb_files_name_the_project_and_the_entity",
            "wandb.entity": "test_wandb_files_name_the_project_and_the_entity",
            "wandb.mode": "test_wandb_contacts_the_server_when_online_but_not_when_offline",
            "tensorboard.directory": "test_event_files_are_in_the_directory_that_the_topology_names",
            "mlflow.uri": "test_mlflow_has_the_run_at_the_uri_and_in_the_experiment_that_the_topology_names",
            "mlflow.experiment": "test_mlflow_has_the_run_at_the_uri_and_in_the_experiment_that_the_topology_names",
            "trackio.project": "test_trackio_has_the_run_in_the_project_that_the_topology_names",
            "trackio.url": "test_trackio_sends_to_the_server_that_the_topology_names",
        }.items()
    },
    **{
        f"monitor.{tracker}.samples": (
            "services/tracker/outlet.py",
            "self._section.samples > 0",
            "integration/tracker/test_tracker_keys.py::test_no_samples_are_sent_if_the_topology_says_so",
        )
        for tracker in ("wandb", "tensorboard", "mlflow", "trackio")
    },
    **{
        f"monitor.{tracker}.samples_every": (
            "services/tracker/outlet.py",
            "self._section.samples_every",
            "unit/tracker/test_outlet.py::test_the_first_recorded_step_of_each_interval_is_due",
        )
        for tracker in ("wandb", "tensorboard", "mlflow", "trackio")
    },
    "algorithm.router_replay": (
        "shared/stages.py",
        "topology.algorithm.route_key == ROUTES",
        "unit/shared/topology/test_expert_checks.py::test_routes_are_a_key_of_the_stage_that_records_them",
    ),
    "algorithm.load_balance.coef": (
        "services/policy_trainer/update.py",
        "algorithm.load_balance.coef",
        "unit/shared/topology/test_expert_checks.py::test_the_loss_reads_the_routes_and_the_coefficient",
    ),
    "placement.engine": (
        "launch/cluster.py",
        "topology.placement.engine",
        "integration/hosts/test_ray_smoke.py::test_a_run_on_two_nodes_completes_and_leaves_nothing_behind",
    ),
    "placement.hosts.*.address": (
        "launch/host.py",
        "there.address",
        "integration/hosts/test_host_agent.py::test_an_agent_listens_at_the_address_that_the_topology_gives_it",
    ),
    "placement.hosts.*.gpus": (
        "launch/placement/book.py",
        "topology.placement.hosts[name].gpus",
        "unit/launch/test_host_book.py::test_an_agent_with_fewer_gpus_than_the_topology_gives_it_is_refused",
    ),
    "monitor.samples.limit_bytes": (
        "services/recorder/server.py",
        "settings.limit_bytes",
        "unit/recorder/test_files.py::test_the_oldest_steps_are_removed_to_stay_within_the_limit",
    ),
    "run.on_bad_step": (
        f"{TRAINER}/driver.py",
        "topology.run.on_bad_step",
        "unit/policy_trainer/test_numbers.py::test_only_bad_data_is_skipped_and_only_when_the_run_allows_it",
    ),
    "policy.distribute": (
        "launch/host.py",
        "topology.policy.distribute",
        "integration/hosts/test_distribution.py::test_a_host_receives_the_files_from_home_and_its_topology_names_them",
    ),
    "policy.head": (
        "services/policy_trainer/worker/start.py",
        "head=model.head",
        "integration/runs/test_preferences.py::test_a_reward_model_is_trained_without_an_engine_and_exported_as_a_classifier",
    ),
    "serve.listen": (
        "services/policy_trainer/tinker/service.py",
        "self._serve.listen",
        "integration/tinker/test_killed.py::test_kills_in_the_middle_change_no_bit",
    ),
    "serve.keys": (
        "services/policy_trainer/tinker/service.py",
        "self._serve.keys",
        "unit/tinker/test_keys.py::test_a_key_is_known_by_its_name",
    ),
    "serve.models": (
        "services/policy_trainer/tinker/application.py",
        "self._serve.models",
        "unit/tinker/test_http.py::test_a_model_of_another_name_is_refused",
    ),
    "serve.max_rank": (
        "services/policy_trainer/tinker/application.py",
        "self._serve.max_rank",
        "unit/tinker/test_http.py::test_a_model_that_cannot_be_trained_is_refused_by_name",
    ),
    "serve.max_models": (
        "services/policy_trainer/tinker/service.py",
        "self._serve.max_models",
        "unit/tinker/test_state.py::test_one_model_too_many_parks_the_one_that_was_used_longest_ago",
    ),
    "serve.full_training": (
        "services/policy_trainer/tinker/application.py",
        "self._serve.full_training",
        "unit/tinker/test_http.py::test_a_server_that_trains_all_weights_refuses_adapters",
    ),
    "serve.body_limit": (
        "services/policy_trainer/tinker/application.py",
        "self._serve.body_limit",
        "unit/tinker/test_http.py::test_a_body_beyond_the_limit_is_refused",
    ),
    "serve.model_requests": (
        "services/policy_trainer/tinker/service.py",
        "self._serve.model_requests",
        "unit/tinker/test_state.py::test_limits_of_a_key_ask_for_patience_but_never_for_the_number_that_is_next",
    ),
    "serve.key_requests": (
        "services/policy_trainer/tinker/service.py",
        "self._serve.key_requests",
        "unit/tinker/test_state.py::test_limits_of_a_key_ask_for_patience_but_never_for_the_number_that_is_next",
    ),
    "policy.lora.alpha": (
        "shared/topology/lora.py",
        "self.alpha / self.rank",
        "unit/shared/topology/test_lora.py::test_the_scale_of_an_adapter_is_alpha_over_rank",
    ),
    "policy.lora.adapter_path": (
        "shared/topology/lora_checks.py",
        "lora.adapter_path",
        "unit/shared/topology/test_lora.py::test_an_adapter_of_another_rank_or_alpha_is_refused_with_both_values",
    ),
    "policy.lora.export_merged": (
        "shared/model/adapter_files.py",
        "lora.export_merged",
        "unit/policy_trainer/test_adapter_export.py::test_an_export_without_a_merged_model_holds_only_the_adapter",
    ),
    "policy.passes.sequences": (
        "shared/model/logprobs.py",
        "self._passes.sequences",
        "unit/shared/test_model_proof.py::test_gradients_do_not_depend_on_the_micro_batch_where_sequences_influence_each_other",
    ),
    "policy.passes.head": (
        "shared/model/logprobs.py",
        "self._passes.head",
        "unit/shared/test_model_proof.py::test_a_head_whose_result_is_used_as_it_is_would_be_found_out",
    ),
    "policy.passes.decoder": (
        "shared/model/plain_decoder.py",
        "passes_of(model).decoder",
        "unit/rollout/test_plain_decoder.py::test_a_model_runs_its_own_modules_unless_its_passes_allow_the_decoder",
    ),
    "policy.chat_template.add_generation_prompt": (
        ROLLOUT,
        "template.add_generation_prompt",
        "unit/shared/topology/test_keys.py::test_a_prompt_ends_with_the_opening_of_an_answer_only_on_request",
    ),
    "policy.chat_template.args": (
        ROLLOUT,
        "template.args",
        "unit/rollout/test_chat_models.py::test_variables_of_the_chat_template_can_be_set",
    ),
    "reward.timeout_s": (
        ROLLOUT,
        "topology.reward.timeout_s",
        "unit/rollout/test_rewards.py::test_the_sample_of_a_hanging_call_is_lost_after_the_timeout",
    ),
    "reward.memory": (
        ROLLOUT,
        "topology.reward.memory",
        "unit/rollout/test_rewards_bad.py::test_only_the_sample_of_a_bad_call_is_lost",
    ),
    "reward.processes": (
        ROLLOUT,
        "topology.reward.processes",
        "unit/rollout/test_rewards.py::test_slow_plain_functions_run_in_all_processes",
    ),
    "reward.retry.limit_s": (
        ROLLOUT,
        "topology.reward.retry",
        "unit/rollout/test_rewards_judge.py::test_samples_are_lost_at_once_if_the_wait_limit_is_zero",
    ),
    "reward.retry.backoff_s": (
        ROLLOUT,
        "topology.reward.retry",
        "unit/rollout/test_rewards_judge.py::test_pauses_between_tries_follow_the_topology",
    ),
    "reward.retry.max_backoff_s": (
        ROLLOUT,
        "topology.reward.retry",
        "unit/rollout/test_rewards_judge.py::test_pauses_between_tries_follow_the_topology",
    ),
    "workflow.function": (
        ROLLOUT,
        "workflow.function",
        "unit/rollout/test_workflow.py::test_the_calculator_returns_the_value_of_each_called_expression",
    ),
    "workflow.params": (
        ROLLOUT,
        "workflow.params",
        "unit/rollout/test_workflow.py::test_the_calculator_returns_the_value_of_each_called_expression",
    ),
    "workflow.timeout_s": (
        ROLLOUT,
        "workflow.timeout_s",
        "unit/rollout/test_workflow.py::test_only_the_sample_that_hangs_is_lost",
    ),
    "workflow.max_tokens": (
        ROLLOUT,
        "chosen.max_tokens",
        "unit/rollout/test_workflow.py::test_a_sample_has_at_most_max_tokens",
    ),
    "workflow.memory": (
        ROLLOUT,
        "workflow.memory",
        "unit/rollout/test_workflow.py::test_only_the_sample_that_kills_its_process_is_lost",
    ),
    "workflow.processes": (
        ROLLOUT,
        "workflow.processes",
        "unit/rollout/test_workflow.py::test_workflows_are_spread_across_processes_without_torch_that_end_with_the_pool",
    ),
    "services.policy-trainer.backend": (
        f"{TRAINER}/worker/start.py",
        "settings.backend",
        "integration/runs/test_quickstart_layouts.py::test_the_quickstart_writes_the_rows_of_one_rank_and_continues_to_learn",
    ),
    "services.policy-trainer.max_tokens_per_micro_batch": (
        f"{TRAINER}/worker/start.py",
        "settings.max_tokens_per_micro_batch",
        "parity/test_gradients_torch.py::test_gradients_equal_those_of_one_process_and_one_micro_batch",
    ),
    "services.policy-trainer.collective_s": (
        f"{TRAINER}/worker/service.py",
        "settings.collective_s",
        "integration/policy_trainer/test_trainer_group.py::test_a_rank_that_hangs_is_named_and_the_others_restart",
    ),
    "services.policy-trainer.recompute": (
        f"{TRAINER}/worker/start.py",
        "settings.recompute",
        "parity/test_gradients_torch.py::test_gradients_equal_those_of_one_process_and_one_micro_batch",
    ),
    "services.reference.backend": (
        "services/reference/service.py",
        "settings.backend",
        "integration/reference/test_reference_group.py::test_two_ranks_score_like_one_follow_the_policy_and_survive_the_death_of_a_rank",
    ),
    "services.reference.max_tokens_per_micro_batch": (
        "services/reference/service.py",
        "settings.max_tokens_per_micro_batch",
        "unit/reference/test_scorer.py::test_small_micro_batches_give_the_same_values_and_report_progress_more_often",
    ),
    "services.reference.collective_s": (
        "services/reference/service.py",
        "settings.collective_s",
        "integration/policy_trainer/test_trainer_group.py::test_a_rank_that_hangs_is_named_and_the_others_restart",
    ),
    "services.rollout.parallel.tp": (
        "services/rollout/engines/__init__.py",
        "settings.parallel.tp",
        "integration/rollout/test_vllm_ranks.py::test_drill_and_updates_reach_both_ranks",
    ),
    "services.rollout.engine": (
        "services/rollout/engines/__init__.py",
        "settings.engine",
        "integration/rollout/test_vllm_cluster.py::test_an_untied_llama_trains_with_log_probs_that_agree",
    ),
    "services.rollout.in_flight": (
        ROLLOUT,
        "settings.in_flight",
        "integration/rollout/test_in_flight.py::test_sequences_continue_under_newer_weights_and_no_token_is_too_old",
    ),
    "services.rollout.partial_s": (
        ROLLOUT,
        "settings.partial_s",
        "integration/rollout/test_partial_rollouts.py::test_samples_of_a_killed_engine_continue_under_newer_weights",
    ),
    "services.rollout.weights": (
        ROLLOUT,
        "settings.weights",
        "integration/rollout/test_vllm_cluster.py::test_every_version_was_sent_and_verified",
    ),
    "services.rollout.transfer_s": (
        ROLLOUT,
        "settings.transfer_s",
        "integration/policy_trainer/test_transfer.py::test_an_engine_that_stops_midway_is_abandoned_at_the_deadline_and_can_return",
    ),
    "services.rollout.engine_args": (
        "services/rollout/engines/__init__.py",
        "settings.engine_args",
        "integration/rollout/test_vllm_engine.py::test_unknown_and_reserved_arguments_are_refused_with_a_one_line_error",
    ),
    "services.batch-store.memory": (
        "services/batch_store/server.py",
        "settings.memory",
        "integration/batch_store/test_bounded.py::"
        "test_full_memory_spills_its_oldest_files_and_puts_wait_while_the_spill_folder_is_full_too",
    ),
    "services.batch-store.spill": (
        "services/batch_store/server.py",
        "settings.spill",
        "integration/batch_store/test_bounded.py::"
        "test_full_memory_spills_its_oldest_files_and_puts_wait_while_the_spill_folder_is_full_too",
    ),
    "services.batch-store.spill_limit": (
        "services/batch_store/server.py",
        "settings.spill_limit",
        "integration/batch_store/test_bounded.py::"
        "test_full_memory_spills_its_oldest_files_and_puts_wait_while_the_spill_folder_is_full_too",
    ),
    "services.batch-store.directory": (
        "launch/checks/preflight.py",
        "topology.services.batch_store.directory",
        "integration/batch_store/test_spill_disk.py::test_a_directory_can_replace_shared_memory",
    ),
    "monitor.prometheus.listen": (
        EXPORTER,
        "settings.listen",
        "integration/exporter/test_exporter.py::test_a_scraper_reads_the_monitors_values_and_learns_when_the_monitor_is_gone",
    ),
    "monitor.prometheus.token": (
        EXPORTER,
        "settings.token",
        "integration/exporter/test_exporter.py::test_a_scraper_without_the_token_is_refused",
    ),
    "monitor.traces.otlp": (
        EXPORTER,
        "_traces.otlp",
        "integration/exporter/test_exporter.py::test_spans_reach_the_file_and_a_collector_that_is_absent_at_first",
    ),
    "monitor.traces.file": (
        EXPORTER,
        "_traces.file",
        "integration/exporter/test_exporter.py::test_spans_reach_the_file_and_a_collector_that_is_absent_at_first",
    ),
    "monitor.traces.file_limit": (
        EXPORTER,
        "settings.file_limit",
        "unit/exporter/test_spans.py::test_the_file_is_valid_after_every_write_and_stays_within_its_limit",
    ),
    "monitor.traces.share": (
        ROLLOUT,
        "topology.monitor.traced_share",
        "unit/exporter/test_spans.py::test_every_process_traces_the_same_tasks",
    ),
    **{
        f"data.train.{key}": ("services/rollout/sampling/tasks.py", read, f"unit/rollout/test_tasks.py::{test}")
        for key, read, test in (
            (
                "sources.*.system",
                "chosen.system",
                "test_a_source_adds_its_system_message_and_its_variables_of_the_template",
            ),
            (
                "sources.*.chat_template",
                "chosen.chat_template",
                "test_a_source_adds_its_system_message_and_its_variables_of_the_template",
            ),
            (
                "sources.*.max_prompt_tokens",
                "chosen.max_prompt_tokens",
                "test_a_prompt_that_is_too_long_is_cut_or_dropped",
            ),
            ("truncate", "data.train.truncate", "test_a_prompt_that_is_too_long_is_cut_or_dropped"),
        )
    },
    "checkpoint.every": (
        f"{TRAINER}/publisher.py",
        "topology.checkpoint.every",
        "integration/policy_trainer/test_bad_steps.py::test_a_bad_step_stops_the_run_which_can_be_resumed_to_skip_it",
    ),
    "checkpoint.keep_every": (
        f"{TRAINER}/service.py",
        "keeping.keep_every",
        "unit/policy_trainer/test_checkpoints.py::test_the_newest_checkpoints_and_those_of_every_nth_step_are_kept",
    ),
    "checkpoint.keep_best": (
        f"{TRAINER}/service.py",
        "keeping.keep_best",
        "unit/policy_trainer/test_best.py::test_the_best_checkpoint_is_kept_beside_the_newest_and_the_earliest_among_equals_is_exported",
    ),
    "checkpoint.memory_every": (
        f"{TRAINER}/driver.py",
        "topology.checkpoint.memory_every",
        "unit/policy_trainer/test_driver_order.py::test_a_snapshot_is_kept_every_few_steps_under_the_lineage",
    ),
    "checkpoint.memory": (
        "launch/checks/preflight.py",
        "topology.checkpoint.memory",
        "unit/launch/test_preflight.py::test_snapshots_that_do_not_fit_are_turned_off_and_one_line_reports_it",
    ),
    "monitor.warnings.off": (
        "services/monitor/warnings/desk.py",
        "topology.monitor.warnings.off",
        "unit/monitor/test_watch.py::test_a_kind_that_is_turned_off_is_not_reported",
    ),
    "lease.lease_s": (
        "services/scheduler/server.py",
        "topology.lease.lease_s",
        "unit/scheduler/test_leases.py::test_only_progress_renews_a_lease",
    ),
    "transport.encrypt_bulk": (
        "services/batch_store/server.py",
        "loaded.transport.encrypt_bulk",
        "integration/hosts/test_stream.py::test_chunks_are_sealed_unless_the_topology_says_otherwise",
    ),
    **{
        f"critic.passes.{name}": (
            "launch/checks/preflight.py",
            "topology.with_passes(passes)",
            "unit/launch/test_critic.py::test_every_trained_model_has_passes_of_its_own",
        )
        for name in ("sequences", "head", "decoder")
    },
    **{
        f"critic.{key}": (
            f"{TRAINER}/driver.py",
            read,
            "unit/policy_trainer/test_algorithm_keys.py::test_every_key_of_a_critic_has_an_effect",
        )
        for key, read in {
            "value_clip": "topology.critic.value_clip",
            "mini_batch_tasks": "model.mini_batch_tasks",
            "num_iterations": "model.num_iterations",
            "warmup_steps": "model.frozen_steps",
            **{f"optimizer.{name}": "self.models[name].optimizer" for name in (*OPTIMIZER, *SCHEDULE, "name")},
        }.items()
    },
    **{
        f"teacher.passes.{name}": (
            "launch/checks/preflight.py",
            "topology.own_models",
            "unit/launch/test_teacher.py::test_a_teacher_has_passes_of_its_own",
        )
        for name in ("sequences", "head", "decoder")
    },
    **{
        f"reward_model.passes.{name}": (
            "launch/checks/preflight.py",
            "topology.own_models",
            "unit/launch/test_reward_model.py::test_a_reward_model_has_passes_of_its_own",
        )
        for name in ("sequences", "head", "decoder")
    },
    "teacher.temperature": (
        "services/reference/service.py",
        "temperature=model.temperature",
        "unit/shared/topology/test_distill_checks.py::test_a_teacher_is_a_second_frozen_model_with_the_policys_values",
    ),
    **{
        f"optimizer.{name}": (
            f"{TRAINER}/update.py",
            f"options.{name}",
            "unit/policy_trainer/test_learning_rate.py::test_linear_and_cosine_schedules_fall_from_the_end_of_warm_up_to_the_floor",
        )
        for name in SCHEDULE
    },
    "optimizer.name": (
        "shared/topology/algorithm.py",
        'name: Literal["adamw"]',
        "unit/shared/topology/test_keys.py::test_only_the_adamw_optimizer_can_be_chosen",
    ),
}
ELSEWHERE |= {
    key.replace("policy-trainer", "critic"): row for key, row in ELSEWHERE.items() if "services.policy-trainer." in key
}
ELSEWHERE |= {
    key.replace("reference", name): row
    for name in ("teacher", "reward-model")
    for key, row in ELSEWHERE.items()
    if "services.reference." in key
}
ELSEWHERE |= {
    f"services.teacher.server.{name}": (
        "services/reference/frozen_server.py",
        f"server.{name}",
        f"unit/reference/test_frozen_server.py::test_{test}",
    )
    for name, test in (
        ("base_url", "a_model_on_a_server_scores_as_it_does_here"),
        ("model", "a_model_that_is_not_served_is_refused_with_those_that_are"),
        ("api_key_env", "an_api_key_that_is_not_set_is_refused_by_name"),
    )
}


def keys(model: type[Section] = Topology, above: str = "") -> Iterator[str]:
    """Yield every leaf of the schema as a user writes it; `*` is any name or any list index."""
    for name, field in model.model_fields.items():
        key = f"{above}{field.alias or name}"
        section = _section(field.annotation)
        if section is None:
            yield key
        else:
            several = "dict" in str(field.annotation) or "tuple" in str(field.annotation)
            yield from keys(section, f"{key}.*." if several else f"{key}.")


def _section(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for each in get_args(annotation) if (found := _section(each)) is not None), None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(40)))
    config = {"max_position_embeddings": 64, "num_attention_heads": 4, "model_type": "llama"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    layers = {f"model.layers.0.self_attn.{name}_proj.weight": torch.zeros(4, 4) for name in "qk"}
    save_file(layers, tmp_path / "model" / "layers.safetensors")
    shutil.copytree(tmp_path / "model", tmp_path / "larger")
    save_file({"more": torch.zeros(10, 10)}, tmp_path / "larger" / "more.safetensors")
    shutil.copytree(tmp_path / "model", tmp_path / "mixture")
    mixture = {**config, "model_type": "mixtral", "num_local_experts": 4}
    (tmp_path / "mixture" / "config.json").write_text(json.dumps(mixture))
    write(tmp_path, BASE.replace("memory: 1MiB", "memory: 8MiB"))
    return tmp_path


def test_every_key_is_listed_once() -> None:
    entered = [
        *OBSERVED,
        *REFUSED,
        *REWARD,
        *ELSEWHERE,
        *(f"optimizer.{name}" for name in OPTIMIZER),
        *(f"algorithm.{name}" for name in ALGORITHM),
    ]
    assert sorted(entered) == sorted(keys())


def derived(topology: Topology) -> list[Any]:
    """Return the values that are derived from a topology: among others, the processes, their arguments and GPUs, the
    scheduler's plan and the sampling."""
    plan = [(spec.service, spec.instance) for spec in topology.services_plan()]
    sets = TaskSets(topology, PromptBuilder.__new__(PromptBuilder), context_tokens=64)
    splits = [TRAIN, *topology.data.eval]
    grants = [
        LeaseGrant(lease_id=1, stage="rollout", split=each, lease_s=1, batch=BatchMeta(tasks=[])) for each in splits
    ]
    return [
        topology.services_plan(),
        visible_gpus(topology),
        [threads_of(topology, service) for service, _ in plan],
        [listen_endpoint(topology.transport, service) for service in (*dict(plan), SUPERVISOR)],
        make_plan(topology, Path("t.yaml")),
        configuration(topology),
        device_limits(topology),
        per_process(topology, parameter_counts(topology)),
        [sets.prepare(grant).sampling for grant in grants],
    ]


@pytest.mark.parametrize("key", OBSERVED)
def test_changing_a_key_changes_the_derived_values(key: str, folder: Path) -> None:
    path = folder / "t.yaml"
    before = derived(load(path, BESIDE.get(key, ())))
    assert before == derived(load(path, BESIDE.get(key, ())))
    assert derived(load(path, OBSERVED[key])) != before


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_without_effect_is_refused_by_name(key: str, folder: Path) -> None:
    with pytest.raises(TopologyError, match="not available in this version"):
        load(folder / "t.yaml", [REFUSED[key]])


def test_the_refused_keys_in_this_build_are_those_tested_here() -> None:
    assert REFUSED.keys() == {f"services.rollout.parallel.{name}" for name in UNSUPPORTED}


@pytest.mark.parametrize("key", REWARD)
def test_rewards_follow_their_keys(key: str, folder: Path) -> None:
    unchanged = (f"reward={NUMERIC[key]}",) if key in NUMERIC else ()
    before, after = (load(folder / "t.yaml", given).reward for given in (unchanged, (f"reward={REWARD[key]}",)))
    assert asyncio.run(scores(before)) != asyncio.run(scores(after))


async def scores(reward: Reward) -> list[float | None]:
    """Return the rewards of four completions of a task whose answer is 7."""
    samples = [Sample("train/0/0", {"answer": "7"}, [], each, [], "stop") for each in ("a", "4", "is 7", "7")]
    pool = RewardPool(
        reward.terms, timeout_s=10, memory_bytes=1 << 30, processes=1, retry=reward.retry, emit=lambda *_: None
    )
    await pool.start()
    try:
        [group] = await pool.score([samples], lambda: None)
    finally:
        await pool.close()
    return [each.value for each in group]


def trained(folder: Path, **given: Any) -> dict[str, torch.Tensor]:
    """Return the weights after two updates with these optimizer settings."""

    def small(_: Path, dtype: str, head: str) -> torch.nn.Module:
        return make_model("qwen3", dtype=getattr(torch, dtype), head_dim=12, tie_word_embeddings=True, vocab_size=61)

    options = BackendOptions(max_tokens=4096, threads=1, device="cpu", scratch=folder, recompute="none", passes=FASTEST)
    backend = TorchBackend(folder, "float32", options, Layout(1).place(0), load=small)
    for step, case in zip((1, 2), cases(), strict=False):
        back(backend, case)
        backend.step(step, adamw(step, **given))
    return backend.state().weights


def test_updates_follow_every_optimizer_key(tmp_path: Path) -> None:
    before = trained(tmp_path)
    for name, value in OPTIMIZER.items():
        after = trained(tmp_path, **{name: value})
        assert any(not torch.equal(each, before[key]) for key, each in after.items()), name


def test_only_the_adamw_optimizer_can_be_chosen(folder: Path) -> None:
    with pytest.raises(TopologyError, match=r"optimizer\.name.*adamw"):
        load(folder / "t.yaml", ["optimizer.name=sgd"])


def test_a_prompt_ends_with_the_opening_of_an_answer_only_on_request() -> None:
    model = ROOT / "launch" / "topologies" / "models" / "tiny-qwen3"
    row = {"prompt": [{"role": "user", "content": "1+1="}]}
    opened, bare = (PromptBuilder(model, add_generation_prompt=each).token_ids(row) for each in (True, False))
    assert opened[: len(bare)] == bare
    assert len(opened) > len(bare)


@pytest.mark.parametrize("key", ELSEWHERE)
def test_keys_tested_elsewhere_are_read_in_the_listed_file_and_have_the_listed_test(key: str) -> None:
    file, read, test = ELSEWHERE[key]
    assert read in (ROOT / file).read_text()
    where, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / where).read_text())
    assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
