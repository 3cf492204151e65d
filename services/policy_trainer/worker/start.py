"""Loads the model of a rank and connects it with the driver's calls. Importing it imports everything that computes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from proto.messages import WorkerRequest
from services.policy_trainer.worker.backend import Backend, BackendOptions, OnAdapted, ignore_adapted
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.calls.clients import ClientCalls
from services.policy_trainer.worker.calls.state import StateCalls
from services.policy_trainer.worker.calls.training import TrainingCalls
from services.policy_trainer.worker.calls.weights import WeightsCalls
from services.policy_trainer.worker.loaded import Loaded
from services.policy_trainer.worker.rank import Rank, Runner
from services.policy_trainer.worker.weights.drill import Drill
from services.policy_trainer.worker.weights.publish import Canaries, EarlierVersions, adapter_drill
from shared.inputs import check_model
from shared.model.adapter import AdapterStart
from shared.model.load import require_deterministic_algorithms
from shared.ranks.layout import RankPlace
from shared.ranks.meeting import Meeting
from shared.ranks.process_group import open_group, own_device
from shared.rundir import RunDir
from shared.samples.text import Choice
from shared.topology.models import TrainedModel


def load(rank: Rank, meeting: Meeting, choice: Choice | None) -> tuple[Backend, Mapping[type[WorkerRequest], Runner]]:
    """Load the model on the compute thread of `rank`, and return its backend and what runs each kind of call."""
    model, publishes = rank.model, rank.model.publishes
    if model.deterministic:
        require_deterministic_algorithms()
    sampled = publishes is not None and publishes.sampled
    with_digests = publishes is not None and not publishes.mapped
    drills: list[Drill] = []

    def drill(adapted: nn.Module, start: AdapterStart) -> None:
        drills.append(adapter_drill(adapted, start, model.dtype, with_digests=with_digests))

    backend = make_backend(rank.run, model, rank.place, meeting, drill)
    backend.called.register_forward_hook(lambda *_: rank.advance())
    canaries = None
    if sampled:
        canaries = Canaries(
            backend, model.folder, model.dtype, model.seed, with_digests=with_digests, drill=next(iter(drills), None)
        )
    earlier = EarlierVersions(model.earlier)
    loaded = Loaded(backend, canaries, earlier)
    several_hosts = bool(meeting.store)
    states = StateCalls(rank, loaded, several_hosts=several_hosts)
    subjects = TrainingCalls(rank, loaded, choice), WeightsCalls(rank, loaded), states
    runners = {kind: run for subject in subjects for kind, run in subject.runners.items()}
    return backend, ClientCalls(rank, loaded, runners, states, several_hosts=several_hosts).runners


def make_backend(
    run: RunDir,
    model: TrainedModel,
    place: RankPlace,
    meeting: Meeting,
    on_adapted: OnAdapted = ignore_adapted,
) -> Backend:
    """Return the backend of this rank with its model. With several ranks, open their process group.

    For `on_adapted`, see `BackendOptions`.
    """
    check_model(run.path, f"{model.name}.model", str(model.folder))
    settings = model.settings
    device = own_device(settings.device, place.rank)
    if place.layout.world_size > 1:
        open_group(meeting, place, device, deadline_s=settings.collective_s)
    options = BackendOptions(
        max_tokens=settings.max_tokens_per_micro_batch,
        threads=settings.threads or 1,
        device=device,
        scratch=model.offloaded(run.path, place.rank),
        recompute=settings.recompute,
        passes=model.passes,
        head=model.head,
        adapter=None if model.lora is None else AdapterStart(model.lora, model.seed),
        on_adapted=on_adapted,
    )
    if settings.backend == "torch":
        return TorchBackend(model.folder, model.dtype, options, place)
    from services.policy_trainer.worker.megatron.backend import MegatronBackend  # this is an optional extra

    return MegatronBackend(model.folder, model.dtype, options, place)
