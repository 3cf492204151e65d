"""All messages of the bus: purpose, fields, sender and receiver. These are the bodies; tensors follow them.

Conventions: times are in seconds, sizes in bytes, and `instance` counts from 0. A task is sent with its fence. Steps
are numbered from 1. Version `step` is the policy after that many steps; version 0 is the model with which the run
began.
"""

from __future__ import annotations

from proto.messages.common import Ack, Array, Error, ErrorCode, Ping, Pong
from proto.messages.hosts import HostCheck, HostFacts, HostGone, HostOrders, HostProcess, HostReport
from proto.messages.process import (
    DrainService,
    GetLog,
    GetStory,
    GetSupervisorState,
    GetWaits,
    HostRow,
    KillInstance,
    LogLines,
    ProcessRow,
    RestartService,
    ScaleService,
    ServiceReport,
    SpareRow,
    StopRun,
    Story,
    StoryRow,
    SupervisorState,
    WaitKind,
    WaitRow,
    Waits,
)
from proto.messages.registration import (
    DeviceOrder,
    Heartbeat,
    HeartbeatAck,
    HoldDevices,
    LeaseProgress,
    Register,
    Registered,
    Resolve,
    Resolved,
    Trouble,
    TroubleKind,
)
from proto.messages.samples import EndedTask, SamplesDue, TakenBack, TakeSamples
from proto.messages.steps import (
    CheckpointSaved,
    CommitStep,
    EvalsDone,
    FinishRun,
    GetRunInfo,
    NextBatch,
    PublishWeights,
    RunInfo,
    StepBatch,
    WaitEvals,
)
from proto.messages.store import (
    Clear,
    GetInventory,
    GetStoreStats,
    Inventory,
    Locate,
    Located,
    PutBegin,
    PutGrant,
    PutSeal,
    PutSealed,
    PutTask,
    StoreStats,
)
from proto.messages.streams import (
    GetStorePlace,
    Held,
    Hold,
    LineOpened,
    OpenLine,
    OpenStream,
    StorePlace,
    StreamOpened,
)
from proto.messages.tasks import (
    BatchMeta,
    BatchPart,
    Canary,
    Complete,
    CompleteAck,
    DropReason,
    LeaseGrant,
    LeaseRequest,
    LossReason,
    Outcome,
    Refusal,
    ReportShards,
    TaskHandle,
    TaskResult,
    TaskState,
    WeightsKind,
    WeightsRef,
)
from proto.messages.telemetry import (
    GetHistory,
    GetSnapshot,
    GetStatus,
    History,
    ServiceRow,
    Snapshot,
    Status,
    Telemetry,
    TopicRow,
    TroubleRow,
    Update,
)
from proto.messages.trainer import (
    AdamW,
    Credit,
    CreditDone,
    CreditSpec,
    Forward,
    ForwardBackward,
    ForwardBackwardDone,
    ForwardDone,
    GetWorkerState,
    HeldSnapshot,
    InitModel,
    LoadCheckpoint,
    LossSpec,
    Meet,
    Met,
    Move,
    Moved,
    OptimStep,
    OptimStepDone,
    Publish,
    Published,
    SaveCheckpoint,
    Saved,
    SaveModel,
    ScoreTogether,
    SkipUpdate,
    WorkerReady,
    WorkerRequest,
    WorkerState,
)
from proto.messages.transfer import AskTransfer, DeviceMemory, EndTransfer, TransferOffer, TransferParameter
