"""Tests that unmodified agents that use OpenAI's chat completions run as workflows and that all sampled tokens are
captured.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from proto.messages import TroubleKind
from services.rollout.sampling.trajectory import Made
from tests.unit.rollout.workflow_rig import VERSION, Rig, logprob_error, rig, run

openai = pytest.importorskip("openai")

AGENTS = "tests.integration.rollout.agents"
REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"n": 0}, "n is 0, but must be a whole number from 1 to 128", None),
    ({"response_format": {"type": "json_object"}}, "response_format", None),
    ({"response_format": "json"}, "response_format", None),
    ({"logit_bias": {"5": 100}}, "logit_bias", None),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice", None),
    ({"max_tokens": 0}, "max_tokens is 0", None),
    ({"messages": []}, "at least one message", None),
    (
        {"messages": [{"role": "user", "content": "1" * 600}]},
        "leaves no room in the model's context of 512",
        "context_length_exceeded",
    ),
]


def only(made: list[list[Made]]) -> Made:
    ((one,),) = made
    assert one.score is None, one.score
    return one


def test_tokens_and_logprobs_of_an_unmodified_agent_are_captured_for_each_sample() -> None:
    made, blocks, _ = run(f"{AGENTS}:two_turns", tasks=2, samples=4, timeout_s=60)
    assert sum(blocks) == 16
    for group in made:
        for each in group:
            assert each.score is None, each.score
            (sequence,) = each.sequences
            mask = sequence.loss_mask == 1
            assert logprob_error(sequence) < 1e-4
            assert set(sequence.versions[mask]) == {VERSION}
            # There are two spans of sampled tokens, so the history that came back over HTTP continued the same
            # sequence.
            assert (np.diff(sequence.loss_mask.astype(int)) == 1).sum() == 2
            assert each.sample.completion == each.sample.state["answers"][1]


def test_a_streamed_answer_equals_the_whole_answer() -> None:
    made = only(run(f"{AGENTS}:streaming", tasks=1, samples=1)[0])
    assert made.sample.state["text"] == made.sample.completion
    assert made.sample.state["finish"] == made.sample.finish_reason
    assert made.sample.state["usage"] == len(made.sample.token_ids)


def test_each_choice_is_a_sequence_and_any_of_them_can_be_continued() -> None:
    made = only(run(f"{AGENTS}:choices", tasks=1, samples=1)[0])
    texts, indices = made.sample.state["texts"], made.sample.state["indices"]
    assert indices == [0, 1, 2]
    assert len(made.sequences) == 3
    assert all(logprob_error(sequence) < 1e-4 for sequence in made.sequences)
    stretches = [int((np.diff(each.loss_mask.astype(int)) == 1).sum()) for each in made.sequences]
    assert sorted(stretches) == [1, 1, 2]
    assert made.sample.messages[1]["content"] == texts[1]


def test_max_tokens_and_stop_shorten_an_answer_and_sampling_follows_the_topology() -> None:
    made = only(run(f"{AGENTS}:shortened", tasks=1, samples=1)[0])
    assert made.sample.state == {"overridden": "temperature,top_p,seed", "tokens": len(made.sample.token_ids)}
    assert len(made.sample.token_ids) <= 2
    assert logprob_error(made.sequences[0]) < 1e-4  # The tokens were sampled at the topology's temperature, 1.0.


def test_an_agent_that_requests_other_sampling_is_reported_once() -> None:
    async def scenario() -> None:
        async with rig() as made:
            assert made.endpoint.troubles() == []
            await made.make(f"{AGENTS}:shortened", tasks=1, samples=2)
            [told] = made.endpoint.troubles()
            assert told.kind == TroubleKind.OVERRIDDEN
            assert told.text == (
                "an agent asks for temperature 0.1 and gets 1, top_p 0.5 and gets 1: the topology decides how to sample"
            )
            await made.make(f"{AGENTS}:shortened", tasks=1, samples=1)
            assert made.endpoint.troubles() == [told]

    asyncio.run(scenario())


def test_unsupported_requests_are_refused_by_name_in_openais_format() -> None:
    made = only(run(f"{AGENTS}:refused", params={"asked": [each for each, _, _ in REFUSED]}, tasks=1, samples=1)[0])
    for (asked, says, code), (message, kind, got) in zip(REFUSED, made.sample.state["errors"], strict=True):
        assert says in message, asked
        assert (kind, got) == ("invalid_request_error", code), asked
    assert made.sample.turns == 1  # No refused request was sampled.


def test_an_agent_may_use_a_blocking_client_on_a_thread() -> None:
    made, blocks, _ = run(f"{AGENTS}:blocking", tasks=1, samples=4, timeout_s=60)
    assert sum(blocks) == 4
    for each in made[0]:
        assert each.score is None, each.score
        assert each.sample.state["answer"] == each.sample.completion


def test_the_url_of_a_sample_cannot_be_guessed_and_is_valid_only_while_the_sample_runs() -> None:
    async def scenario() -> None:
        async with rig() as made:
            (group,) = await made.make(f"{AGENTS}:notes_url", tasks=1, samples=2)
            noted = [each.sample.state["urls"] for each in group]
            assert all(first == second for first, second in noted)
            urls = [first for first, _ in noted]
            assert len(set(urls)) == 2
            assert all(url.startswith("http://127.0.0.1:") for url in urls)
            for url in (urls[0], urls[0].rpartition("/s/")[0] + "/s/guess/v1"):
                async with openai.AsyncOpenAI(base_url=url, api_key="any") as client:
                    with pytest.raises(openai.NotFoundError, match="no running sample has this address"):
                        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "1"}])

    asyncio.run(scenario())


async def raw(made: Rig, data: bytes) -> bytes:
    url = made.endpoint.open(object())  # type: ignore[arg-type]  # an address that is never called
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
    writer.write(data)
    writer.write_eof()
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /s/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{}",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 100000,
        bytes(range(256)) * 100,
    ],
)
def test_bytes_that_are_not_a_request_end_only_their_connection(data: bytes) -> None:
    async def scenario() -> None:
        async with rig() as made:
            answer = await raw(made, data)
            assert answer == b"" or answer.split(b" ")[1] in (b"400", b"404")
            assert b"404" in (await raw(made, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).split(b"\r\n")[0]

    asyncio.run(scenario())


def test_an_agent_that_abandons_its_calls_leaves_nothing_behind() -> None:
    # There is room for only one call, so the last call succeeds only once the abandoned calls have released their
    # space. The tokens of the abandoned calls are not trained on.
    made = only(run(f"{AGENTS}:goes_away", tasks=1, samples=1, max_tokens=40, timeout_s=10)[0])
    assert len(made.sequences) == 1
