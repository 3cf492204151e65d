"""Lists the promises that mutations break: sentences of docs/architecture.md and README.md."""

from __future__ import annotations

from enum import StrEnum


class Promise(StrEnum):
    """A promise, as the beginning of the sentence that makes it. The first nine are the numbered ones."""

    READABLE = "An acknowledged put is readable until its task is collected"
    ONCE = "A task affects the weights exactly once."
    COLLECTED = "Nothing is read after its collection"
    BYTES = "Held bytes never exceed the configured limit."
    DEADLINES = "Every wait has a deadline"
    METADATA = "Control messages do not carry tensors larger than 64 KiB."
    SPLITS = "Gradients are equal for every split of the same optimizer batch"
    SYNCED = "After a weight sync every tensor in the engine equals the trainer's"
    SAME_BITS = "Deterministic runs with the same seed produce bit-identical results"
    STALENESS = "Together these rules limit staleness to η"
    LOSS = "Log-probs have three sources"
    KILLED = "Kill any process, lose nothing."
    WIRE = "No pickle and no open socket in our own protocol."
    FAILED_SAMPLE = "If a reward function raises or returns NaN, only that sample is lost"
