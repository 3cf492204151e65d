"""The protobuf messages that Tinker clients send and expect, as classes built from their field numbers.

No .proto file is published for them, so this table is written from the numbers that the SDK sends. A field that is not
listed is ignored, as protobuf demands. `Any` stands for a message, whose class exists only at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.message import DecodeError

from services.policy_trainer.tinker.errors import BadRequest

_PACKAGE = "tinker_public"
_MESSAGES: Mapping[str, str] = MappingProxyType(
    {
        # Requests. `image` and `dmel` are declared so that they can be refused by name.
        "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, "
        "5 loss_fn_config double%, 6 forward_only bool, 7 loss_fn_config_v2 LossConfigValue%",
        "LossConfigValue": "1 number double?, 2 text string?",
        "Datum": "1 model_input Chunk*, 2 loss_fn_inputs Tensor%",
        "Chunk": "1 encoded_text EncodedText?, 2 image bytes?, 3 dmel bytes?",
        "EncodedText": "1 tokens bytes",
        "Tensor": "1 dense bytes?, 2 sparse_csr SparseCsr?, 3 dtype int32, 4 shape int64*",
        "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
        # Results.
        "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics double%",
        "ArrayRecord": "1 type_tag string, 2 fields BatchedTensor%, 3 num_datums int64",
        "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
        "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes?, "
        "3 topk_prompt_logprobs TopkLogprobs, 4 prompt_cache_hit_tokens int32, 5 target_prompt_logprobs Tensor",
        "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes?, "
        "4 topk_sampled_logprobs TopkLogprobs",
        "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    }
)
"""Each message as `number name type`; after the type, `*` means repeated, `%` a map from strings, and `?` that the
presence of the field is known."""
_SCALARS: Mapping[str, int] = MappingProxyType(
    {
        "string": Field.TYPE_STRING,
        "bytes": Field.TYPE_BYTES,
        "int32": Field.TYPE_INT32,
        "int64": Field.TYPE_INT64,
        "uint32": Field.TYPE_UINT32,
        "double": Field.TYPE_DOUBLE,
        "bool": Field.TYPE_BOOL,
    }
)


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="tinker_public.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            number, field_name, kind = field.split()
            _add_field(message, int(number), field_name, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


def _add_field(message: Any, number: int, name: str, kind: str) -> None:
    bare, mark = (kind[:-1], kind[-1]) if kind[-1] in "*%?" else (kind, "")
    if mark == "%":
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", bare)
        bare = f"{message.name}.{entry_name}"
    field = message.field.add(name=name, number=number)
    field.label = Field.LABEL_REPEATED if mark in ("*", "%") else Field.LABEL_OPTIONAL
    if bare in _SCALARS:
        field.type = _SCALARS[bare]
    else:
        field.type, field.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{bare}"
    if mark == "?":
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


_CLASSES = _classes()


def new(name: str) -> Any:
    """Return an empty message."""
    return _CLASSES[name]()


def parse(name: str, body: bytes) -> Any:
    """Return the message in `body`. Raises BadRequest if it is none."""
    message = new(name)
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BadRequest(f"the body is no {name}: {error}") from None
    return message
