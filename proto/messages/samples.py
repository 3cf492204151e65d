"""Messages between the scheduler and the recorder, which writes human-readable samples."""

from __future__ import annotations

from proto.messages.store import PutTask
from proto.registry import Message, Record, Request, message


class EndedTask(Record, frozen=True, array_like=True):
    """A task whose samples are to be recorded."""

    task_id: str
    fence: int
    state: str  # `trained`, `filtered`, `dropped` or `scored`
    step: int  # the step that trained it, the step formed after it was dropped, or the policy version that was scored
    lineage: int  # lineage of the weights when the task ended
    samples: int = 0  # number of samples that did not fail; 0 means that there is at most the shard with the text
    store: str = ""  # name of the store that has its rollout shards; empty if there are none
    reason: str = ""  # the reason for dropping it, in one line
    rewards: dict[str, list[float]] = {}  # with a reward model: the scalars `reward` and `reward/part/reward_model`


class TakenBack(Record, frozen=True, array_like=True, gc=False):
    """A return of the run to an earlier step."""

    lineage: int  # lineage that ended with this return
    step: int  # the step to which the run returned


@message(118)
class SamplesDue(Message, frozen=True, kw_only=True):
    """Tasks to record. Their shards are kept until the next `TakeSamples` names the tasks, or until the time allowed
    for that has passed.
    """

    tasks: list[EndedTask] = []  # the oldest tasks that are due
    trainer_stores: list[str] = []  # the stores into which the trainer puts advantages and log-probs
    rewinds: list[TakenBack] = []
    """The returns to earlier steps that the recorder does not know of yet. Before it records any of `tasks`, it must
    discard the samples of all steps and versions after a return's step that belong to the return's lineage or to an
    earlier one."""
    lost: int = 0  # number of tasks so far whose samples were lost because the recorder was too slow or not running


@message(117, reply=SamplesDue)
class TakeSamples(Request, frozen=True, kw_only=True):
    """The recorder asks for tasks that have ended. The answer is deferred until some are due.

    Errors:
        not_ready: no task became due before the deadline.
    """

    incarnation: int
    taken: list[PutTask] = []  # tasks in earlier answers that have been recorded or whose shards cannot be read
    rewinds: int = 0  # how many returns to earlier steps the recorder knows of
    final: bool = False  # answer at once, even if no task is due, because the run is ending
