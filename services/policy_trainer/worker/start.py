"""Sets up a rank's device, process group and backend according to the topology, and selects the backend."""

from __future__ import annotations

from pathlib import Path

from services.policy_trainer.worker.backend import Backend, BackendOptions
from services.policy_trainer.worker.backend_torch import TorchBackend
from shared.inputs import check_model
from shared.ranks.layout import Place
from shared.ranks.meeting import Meeting
from shared.ranks.process_group import open_group, own_device
from shared.rundir import RunDir
from shared.topology import Topology


def make_backend(run: RunDir, topology: Topology, place: Place, meeting: Meeting) -> Backend:
    """Return this rank's backend with the topology's model. With several ranks, open their process group."""
    check_model(run.path, "policy.model", topology.policy.model)
    options = topology.services.policy_trainer
    device = own_device(options.device, place.rank)
    if place.layout.world_size > 1:
        open_group(meeting, place, device, deadline_s=options.collective_s)
    settings = BackendOptions(
        max_tokens=options.max_tokens_per_micro_batch,
        threads=options.threads or 1,
        device=device,
        scratch=run.path / "offloaded",
        recompute=options.recompute,
        passes=topology.policy.passes,
    )
    policy = topology.policy
    if options.backend == "torch":
        return TorchBackend(Path(policy.model), policy.dtype, topology.optimizer, settings, place)
    from services.policy_trainer.worker.megatron.backend import MegatronBackend  # this is an optional extra

    return MegatronBackend(Path(policy.model), policy.dtype, topology.optimizer, settings, place)
