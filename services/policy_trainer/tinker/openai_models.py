"""What the names of models mean to OpenAI clients: the names of the base, and the paths of the key's samplers."""

from __future__ import annotations

from starlette.requests import Request

from proto.messages import ErrorCode
from services.policy_trainer.openai_app import ServedModel
from services.policy_trainer.tinker.belongings import Belongings
from services.policy_trainer.tinker.exchange import key_of
from shared.rpc.errors import RpcError
from shared.topology.serve import Serve


class OpenAIModels:
    """The models of a server."""

    def __init__(self, own: Belongings, serve: Serve) -> None:
        self._own = own
        self._serve = serve

    def names(self, request: Request) -> list[str]:
        """Return the models of the request's key."""
        own = (one.path for one in self._own.checkpoints.values() if one.sampler and one.key == key_of(request))
        return [*self._serve.models, *own]

    def find(self, name: str, request: Request) -> ServedModel | None:
        """Return a model of the request's key, or None. Raises RpcError(lost) for one that is not published yet."""
        if name in self._serve.models:
            return ServedModel(name, None)
        checkpoint = self._own.checkpoints.get(name)
        if checkpoint is None or checkpoint.key != key_of(request):
            return None
        version = self._own.versions.get(checkpoint.version)
        if version is None and not self._own.published:
            raise RpcError(ErrorCode.LOST, f"model {name}: its weights are being published; try again")
        return None if version is None else ServedModel(name, version.ref)
