"""Defines the parts of Kubernetes objects that our manifests use, with the names and types from the official
definitions.

The definitions are those of the core API, JobSet v0.12.0 (jobset.x-k8s.io_jobsets.yaml) and KubeRay v1.7.0
(ray.io_rayclusters.yaml). An API server drops or refuses a field that it does not know; here, such a field is an error.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|[KMGT]i?)?$")]
Name = Annotated[str, Meta(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Positive = Annotated[int, Meta(ge=1)]


class _Object(Struct, rename="camel", forbid_unknown_fields=True):
    pass


class Metadata(_Object):
    name: Name


class FieldRef(_Object):
    field_path: str


class ValueFrom(_Object):
    field_ref: FieldRef


class Env(_Object):
    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class Resources(_Object):
    requests: dict[str, Quantity]
    limits: dict[str, Quantity]


class Exec(_Object):
    command: list[str]


class Handler(_Object):
    exec: Exec


class Lifecycle(_Object):
    pre_stop: Handler


class TcpSocket(_Object):
    port: Positive


class Probe(_Object):
    period_seconds: Positive
    failure_threshold: Positive
    timeout_seconds: Positive = 1
    exec: Exec | None = None
    tcp_socket: TcpSocket | None = None


class VolumeMount(_Object):
    name: Name
    mount_path: str
    read_only: bool = False


class Container(_Object):
    name: Name
    image: str
    resources: Resources
    volume_mounts: list[VolumeMount]
    liveness_probe: Probe
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    lifecycle: Lifecycle | None = None
    command: list[str] = []
    args: list[str] = []
    env: list[Env] = []


class EmptyDir(_Object):
    medium: Literal["", "Memory"] = ""
    size_limit: Quantity | None = None


class Claim(_Object):
    claim_name: str


class Volume(_Object):
    name: Name
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: Claim | None = None


class SecurityContext(_Object):
    run_as_user: int
    run_as_group: int
    run_as_non_root: bool
    fs_group: int
    fs_group_change_policy: Literal["Always", "OnRootMismatch"]


class PodSpec(_Object):
    containers: list[Container]
    volumes: list[Volume]
    security_context: SecurityContext
    termination_grace_period_seconds: Positive = 30
    restart_policy: Literal["Always", "OnFailure", "Never"] = "Always"


class PodTemplate(_Object):
    spec: PodSpec


class JobSpec(_Object):
    template: PodTemplate
    backoff_limit: int
    completion_mode: Literal["NonIndexed", "Indexed"] = "NonIndexed"
    completions: Positive = 1
    parallelism: Positive = 1


class JobTemplate(_Object):
    spec: JobSpec


class ReplicatedJob(_Object):
    name: Name
    replicas: Positive
    template: JobTemplate


class SuccessPolicy(_Object):
    operator: Literal["All", "Any"]
    target_replicated_jobs: list[str]


class JobSetSpec(_Object):
    success_policy: SuccessPolicy
    replicated_jobs: list[ReplicatedJob]


class JobSet(_Object):
    api_version: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec


class AuthOptions(_Object):
    mode: Literal["disabled", "token"]


class HeadGroup(_Object):
    ray_start_params: dict[str, str]
    template: PodTemplate


class WorkerGroup(_Object):
    group_name: Name
    replicas: int
    min_replicas: int
    max_replicas: int
    ray_start_params: dict[str, str]
    template: PodTemplate


class RayClusterSpec(_Object):
    ray_version: str
    auth_options: AuthOptions
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class RayCluster(_Object):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: RayClusterSpec
