"""A rollout service, written from proto/SPEC.md alone, that does the work of one task. It uses the client in
stranger.py.

    python tests/golden/stranger_works.py RUN_DIR OUT.json

The program writes the id and the fence of the task to OUT.json. Numbers in comments are sections of SPEC.md.
"""

import json
import os
import socket
import sys

import numpy as np
from stranger import Peer, put


def inline(array):
    """Encode an array as msgpack-numpy does (section 3)."""
    return {b"nd": True, b"type": array.dtype.str, b"kind": b"", b"shape": array.shape, b"data": array.tobytes()}


def rollout(sockets, out):
    """Do the work of one task (section 8, Work): two samples with every key that the stage produces."""
    scheduler, store = (Peer(f"ipc://{sockets}/{name}") for name in ("scheduler-0", "batch-store-0"))
    me = {"service": "rollout", "instance": 7, "incarnation": scheduler.life}
    scheduler.ask(21, 20, **me, pid=os.getpid(), host=socket.gethostname(), endpoint="")
    grant = scheduler.ask(31, 30, **me, stage="rollout", max_tasks=1)
    task, fence = grant["batch"]["tasks"][0][:2]
    lengths = np.array([5, 4], np.int32)
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1], np.uint8)
    shards = {
        "token_ids": np.arange(1, 10, dtype=np.int32),
        "lengths": lengths,
        "sample_index": np.arange(2, dtype=np.int32),
        "loss_mask": mask,
        "rollout_logprobs": np.where(mask, -0.5, 0).astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int32),
    }
    digest = put(store, task, fence, shards)
    result = [
        task,
        fence,
        0,
        "batch-store/0",
        digest,
        2,
        int(lengths.sum()),
        sum(each.nbytes for each in shards.values()),
    ]
    rewards = {"reward": inline(np.array([1, 0], np.float32))}
    answer = scheduler.ask(
        33,
        32,
        lease_id=grant["lease_id"],
        stage="rollout",
        incarnation=me["incarnation"],
        results=[result],
        scalars=rewards,
    )
    assert not answer["refused"], answer
    with open(out, "w") as file:
        json.dump({"task": task, "fence": fence}, file)


def main(run_dir, out):
    with open(f"{run_dir}/run.json") as source:  # Section 1 describes the file.
        rollout(json.load(source)["sockets"], out)


if __name__ == "__main__":
    main(*sys.argv[1:])
