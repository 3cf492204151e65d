"""Messages from a server to engines, which sample with the models of its clients. There are no tasks and no leases."""

from __future__ import annotations

import msgspec

from proto.messages.common import Ack, Array
from proto.messages.tasks import BatchMeta, WeightsRef
from proto.registry import Message, Request, message


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """Arrays by name. The message itself carries them if they have at most 64 KiB together. Otherwise they are shards
    of one task, which the reader clears. A task that is gone too early (`collected`, `missing`) is put again."""

    arrays: dict[str, Array] = {}  # the arrays, unless there is a `batch`
    batch: BatchMeta | None = None  # the task whose shards are the arrays


@message(130, reply=Ack)
class LoadVersion(Request, frozen=True, kw_only=True):
    """Hold a version beside those that the engine holds, and prove it as in a sync of a training run.

    If every place for a version is taken, the engine drops the version that was used least recently.

    Errors:
        busy: open requests name the versions in all places.
        conflict: the engine and the trainer disagree. The engine exits.
        gone: the store no longer has the weights.
    """

    weights: WeightsRef  # the version


@message(131, reply=Ack)
class UnloadVersion(Request, frozen=True, kw_only=True):
    """Drop a version once no open request names it. An engine that does not hold the version changes nothing."""

    task_id: str  # as in `WeightsRef`
    fence: int  # as in `WeightsRef`


@message(132)
class SampledTokens(Message, frozen=True, kw_only=True):
    """The samples of one prompt."""

    parcel: Parcel
    """`lengths` int32 [samples], and of all samples one after the other `token_ids` int32, `logprobs` float32 and
    `versions` int32. Log-probs are those of the distribution that was sampled from, and at temperature 1 if the
    temperature is 0. A version is the step of the version that sampled a token, or -1 for the base. If asked for, also,
    at temperature 1: `prompt_logprobs` float32 [T - 1], `top_ids` int32 and `top_logprobs` float32 [T - 1, k],
    `target_logprobs` float32 [T - 1, K] with 0 where nothing was asked, and of all samples one after the other
    `sample_top_ids` int32 and `sample_top_logprobs` float32 [N, k]."""
    reasons: list[str]  # for each sample, why it ended: "stop" or "length"
    texts: list[str] = []  # for each sample, its text without special tokens, up to a stop text, if asked for


@message(133, reply=SampledTokens)
class SampleTokens(Request, frozen=True, kw_only=True):
    """Sample continuations of a prompt with a version that the engine holds.

    The same request gives the same tokens on an engine that computes on a CPU, whatever it samples beside it, unless
    two results are closer than rounding. A caller that no longer waits sends `CancelSampling`.

    Errors:
        bad_request: a value is outside its range, or the prompt leaves no room in the model's context.
        busy: the engine has too many open samples.
        collected: the prompt's shards are gone.
        missing: the engine does not hold the version (`LoadVersion`).
    """

    name: str  # name of this request, unique among the sender's
    task_id: str = ""  # the version, as in `WeightsRef`; empty: the base, without an adapter
    fence: int = 0  # as in `WeightsRef`
    prompt: Parcel
    """`token_ids` int32 [T], T above 0. With `targets` int32 [T - 1, K], also return the log-probs of these tokens at
    the places of the prompt's second to last token; -1 asks for none."""
    samples: int = 1  # number of samples, from 1 to 1,024
    max_tokens: int = 0  # maximum number of tokens in a sample; 0: up to the end of the context
    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # only the likeliest tokens, this many, can be sampled; 0: all
    top_p: float = 1.0
    """Nucleus: after `top_k`, only the smallest set of likeliest tokens with at least this probability. Above 0."""
    stop: list[str] = []  # texts that end a sample, at most 16
    stop_ids: list[int] = []  # tokens that end a sample, at most 64
    ends: bool = True  # whether the model's own end tokens end a sample
    seed: int = 0  # with the prompt, determines the random numbers
    prompt_logprobs: bool = False  # also return the log-probs of the prompt's tokens
    top_prompt_logprobs: int = 0  # for each of these, also the likeliest tokens, this many, from 0 to 20
    top_logprobs: int = 0  # for each sampled token, also the likeliest tokens, this many, from 0 to 20
    texts: bool = False  # also return the texts of the samples


@message(134, reply=Ack)
class CancelSampling(Request, frozen=True, kw_only=True):
    """Abandon a request, whose caller no longer waits. A request that is not open is no error."""

    name: str  # as in `SampleTokens`


@message(135)
class RenderedPrompt(Message, frozen=True, kw_only=True):
    """The tokens of a prompt."""

    prompt: Parcel  # `token_ids` int32 [T]


@message(136, reply=RenderedPrompt)
class RenderPrompt(Request, frozen=True, kw_only=True):
    """Turn a text, or messages, into tokens with the policy's tokenizer and chat template.

    Errors:
        bad_request: the prompt is malformed, the template refuses it, or it is longer than the model's context.
    """

    row: bytes
    """A JSON object with the `prompt`, a text or a list of messages, and, for messages, `tools` or nothing."""
