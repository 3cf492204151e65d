"""Asks through the Tinker SDK for log-probs of several kinds, and prints how far those that must agree differ, as a
JSON object. Runs in `.venv-tinker`: `TINKER_BASE_URL=… TINKER_API_KEY=… python sdk_scores.py MODEL`."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import tinker
import torch
from tinker import types


def main() -> None:
    sampler = tinker.ServiceClient().create_sampling_client(base_model=sys.argv[1]).result()
    prompt = list(range(5, 21))
    whole = types.ModelInput.from_ints(prompt)
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3, stop=[])
    sampled = sampler.sample(prompt=whole, num_samples=3, sampling_params=params, topk_sample_logprobs=20).result()
    unsorted, missed = 0.0, 0.0
    for sequence in sampled.sequences:
        assert len(sequence.topk_logprobs) == len(sequence.tokens) == 6
        for token, logprob, likeliest in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            values = [value for _, value in likeliest]
            unsorted = max(unsorted, *(after - before for before, after in pairwise(values)), 0.0)
            missed = max(missed, abs(dict(likeliest).get(token, logprob) - logprob))
    # The tokens of the prompt themselves, and at one place some others.
    asked = torch.full((len(prompt) - 1, 4), -1, dtype=torch.int64)
    asked[:, 0] = torch.tensor(prompt[1:])
    asked[7, 1:] = torch.tensor([4, 9, 30])
    one = types.SamplingParams(max_tokens=1)
    scored = sampler.sample(
        prompt=whole,
        num_samples=1,
        sampling_params=one,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=20,
        target_prompt_logprobs=types.TensorData.from_torch(asked),
    ).result()
    alone = torch.full_like(asked, -1)
    alone[7] = asked[7]
    tensor = types.TensorData.from_torch_sparse(alone, pad_value=-1)
    assert tensor.sparse_crow_indices is not None
    few = sampler.sample(prompt=whole, num_samples=1, sampling_params=one, target_prompt_logprobs=tensor).result()
    assert few.prompt_logprobs is None
    given, sparse = scored.target_prompt_logprobs.to_torch(), few.target_prompt_logprobs.to_torch()
    assert given.shape == sparse.shape == asked.shape
    assert (given[asked == -1] == 0).all()
    likeliest = dict(scored.topk_prompt_logprobs[8])
    print(
        json.dumps(
            {
                "likeliest_of_samples": unsorted,
                "sampled_among_likeliest": missed,
                "targets_and_prompt": float((given[:, 0] - torch.tensor(scored.prompt_logprobs[1:])).abs().max()),
                "targets_and_likeliest": max(
                    abs(likeliest.get(token, value) - value)
                    for token, value in zip(asked[7].tolist(), given[7].tolist(), strict=True)
                ),
                "sparse_and_dense": float((given[7] - sparse[7]).abs().max()),
            }
        )
    )


if __name__ == "__main__":
    main()
