"""docs/metrics.md lists exactly the names that rows of metrics.jsonl can have."""

from __future__ import annotations

import fnmatch
import re

import numpy as np
from msgspec.structs import replace

from proto.messages import BatchMeta, CreditDone, CreditSpec, DropReason, ForwardBackwardDone, LossReason, OptimStepDone
from services.exporter.families import METRICS
from services.policy_trainer.advantages import KL_SCALAR
from services.policy_trainer.metrics import ModelMetrics, StepMetrics
from services.policy_trainer.preferences import Compared
from services.policy_trainer.update import statistics_of
from services.scheduler.evaluations import Evaluation
from services.scheduler.events import WriteRow
from shared.stages import REFERENCE_SCALAR
from shared.topology.models import CRITIC, POLICY
from shared.view.curves import PANELS
from tests.integration.tiny.harness import ROOT
from tests.metric_names import DOCUMENT, documented, undocumented
from tests.unit.policy_trainer.test_numbers import step_batch
from tests.unit.scheduler.bench import Bench, plan


def everything() -> set[str]:
    """Return every name. The names are taken from the code that produces them, except those about stores, which the
    scheduler's service adds."""
    extra = (KL_SCALAR, REFERENCE_SCALAR, "reward/part/form", "reward/source/a", "workflow/turns")
    batch = step_batch([1, 0, 0, 1])
    batch = replace(
        batch,
        scalars=batch.scalars | {name: np.ones(4, np.float32) for name in extra},
        drops={reason: 1 for reason in DropReason},
        lost={reason: 1 for reason in LossReason},
    )
    metrics = StepMetrics(step=5, models={POLICY: ModelMetrics(), CRITIC: ModelMetrics()})
    names = ("kl", "mismatch", "mismatch_max", "engine_tokens", "lag_tokens", "weighed", "weight_squared", "capped")
    sums = dict.fromkeys((*names, "teacher_kl", "teacher_gap_max", "teacher_mass"), 1.0)
    sums |= dict.fromkeys(("moe_entropy", "moe_load_max", "moe_unused_max", "moe_strayed", "balance"), 1.0)
    metrics.policy.add_gradient(ForwardBackwardDone(sums=sums, seconds=1.0))
    metrics.policy.add_update(OptimStepDone(grad_norm=1.0, lr=1e-3, seconds=1.0))
    statistics = {
        name: np.ones(1) for name in statistics_of(CreditSpec(name="gae", gamma=1.0, values=True, distill_coef=1.0))
    }
    statistics["count"] = np.full(1, 2.0)
    metrics.add_credit(CreditDone(meta=BatchMeta(tasks=[]), statistics=statistics, seconds=1.0))
    metrics.add_compared(Compared(0.5, 0.1, 1.0, np.zeros(4)))
    evaluation = Evaluation.of("held", (0, 0), 4, ["held/0/0"])
    evaluation.score(0, {"reward": np.ones(4, np.float32), "reward/part/form": np.ones(4, np.float32)}, 0)
    bench = Bench(plan(by_completion=True)).start()
    bench.step(1)
    written = next(effect.row for effect in bench.effects if isinstance(effect, WriteRow))
    return {*metrics.row(batch, step_s=1.0), *evaluation.metrics(), *written, "store/bytes", "store/shards"}


def test_every_name_is_documented_and_every_documented_name_exists() -> None:
    names = everything()
    assert undocumented(names) == set()
    assert [each.pattern for each in documented() if not any(map(each.fullmatch, names))] == []


def test_every_reason_for_a_drop_or_loss_is_documented() -> None:
    reasons = DOCUMENT.read_text().split("## Reasons")[1]
    listed = {*DropReason, *LossReason} - {DropReason.WEIGHTS_LOST}  # This reason applies only to evaluations.
    assert {reason for reason in listed if f"`{reason}`" not in reasons} == set()


def test_names_in_the_comparison_with_other_systems_are_documented() -> None:
    rows = DOCUMENT.read_text().split("|---|---|---|---|\n")[1].split("\n\n")[0]
    names = [name for row in rows.splitlines() for name in re.findall("`([^`]+)`", row.split(" | ")[0])]
    assert len(names) > 30
    assert undocumented(names) == set()


def test_an_undocumented_metric_name_is_found() -> None:
    assert undocumented({"reward/mean", "reward/median", "reward/part/any thing"}) == {"reward/median"}


def test_every_chart_shows_metrics_that_exist() -> None:
    names = everything()
    patterns = [pattern for panel in PANELS for pattern in panel.names]
    assert [each for each in patterns if not fnmatch.filter(names, each)] == []


def test_every_view_shows_how_many_samples_the_update_can_learn_from() -> None:
    wanted = {"rollout/kl", "rollout/is_eff_sample_size", "rollout/is_max", "rollout/zero_variance_fraction"}
    dashboard = (ROOT / "launch" / "dashboards" / "grafana.json").read_text()
    queried = {metric.name for metric in METRICS if f'"{metric.family}{{' in dashboard}
    assert wanted - {name for panel in PANELS for name in panel.names} == set()
    assert wanted - queried == set()
