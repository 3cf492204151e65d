"""The topology: one YAML file that describes a whole run, read into a checked, frozen object.

`load` is the entry point. Importing this package imports pydantic and ruamel.yaml, but not torch.
"""

from shared.topology.capacity import snapshot_bytes, stop_limit_s, task_bytes, weight_bytes, worst_case_bytes
from shared.topology.document import TopologyError
from shared.topology.load import hub_names, load, load_resolved
from shared.topology.schema import TRAINER_STORE, ServiceSpec, Topology

__all__ = [
    "TRAINER_STORE",
    "ServiceSpec",
    "Topology",
    "TopologyError",
    "hub_names",
    "load",
    "load_resolved",
    "snapshot_bytes",
    "stop_limit_s",
    "task_bytes",
    "weight_bytes",
    "worst_case_bytes",
]
