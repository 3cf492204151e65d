"""The server as an actor. It takes the place of the driver: the same dispatch, but its algorithm comes over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.routing import Mount

from services.policy_trainer.dispatch import group_dispatch
from services.policy_trainer.models import Models
from services.policy_trainer.openai_app import openai_app
from services.policy_trainer.sampling.sampler import Sampler
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.tinker.application import Handlers, application
from services.policy_trainer.tinker.gate import KeyGate
from services.policy_trainer.tinker.journal import FILE, ServerJournal
from services.policy_trainer.tinker.keys import ClientKeys, make
from services.policy_trainer.tinker.limits import KeyLimits
from services.policy_trainer.tinker.openai_models import OpenAIModels
from services.policy_trainer.tinker.restart import restore
from services.policy_trainer.tinker.samples import SampleFutures
from services.policy_trainer.tinker.sampling import ServedBase
from services.policy_trainer.tinker.server import Server
from services.policy_trainer.tinker.state import State
from services.policy_trainer.tinker.trainer import Trainer
from services.policy_trainer.tinker.wire import ModelLimits
from shared import topology as topologies
from shared.actor.service import Service
from shared.dataplane.client import DataClient
from shared.guest_server import GuestServer
from shared.rpc.errors import BadInput
from shared.rundir import RunDir
from shared.topology import TRAINER_STORE, Topology, stop_limit_s
from shared.topology.capacity import context_tokens, limit_bytes
from shared.topology.model_files import vocabulary
from shared.topology.monitor import split_address
from shared.topology.serve import KeysError, Serve

IDLE_S = 120
SHARE_OF_STORE = 0.5
"""The part of the store that clients' data may take up together. Versions and results need the rest."""
UNBOUNDED_CONTEXT = 1 << 20
"""Maximum number of tokens of a sequence if the model's files do not say one."""
SWEEP_S = 30.0


class TinkerService(Service):
    """The service `python -m services.policy_trainer` of a topology with a section `serve`. It ends when it is
    stopped."""

    NAME = "policy-trainer"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        topology = topologies.load_resolved(run.topology)
        if topology.serve is None:
            raise BadInput(f"{run.topology}: has no section serve")
        self._topology: Topology = topology
        self._serve: Serve = topology.serve
        try:
            self._keys = ClientKeys(self._serve.keys or make(run.keys))
        except KeysError as error:
            raise BadInput(f"serve.keys: {error}") from error
        store = limit_bytes(topology)
        share = int(store * SHARE_OF_STORE / len(self._keys))
        limits = KeyLimits(self._serve.model_requests, self._serve.key_requests, share)
        self._state = State(self._serve.max_models, limits)
        self._scheduler = SchedulerCalls(self.scheduler, self.incarnation)
        self._data = DataClient(self.client, reports=True, plain=not topology.transport.encrypt_bulk)
        self._ending = False
        self._sampler = Sampler(
            self.client,
            self._data,
            incarnation=self.incarnation,
            store=TRAINER_STORE,
            engines=topology.services.rollout.instances,
        )

    async def start(self) -> None:
        """Read the journal, and listen."""
        folder = Path(self.run.path)
        self._journal = ServerJournal(folder / FILE)
        workers = group_dispatch(self._topology.policy_model, self.client, self.incarnation)
        trainer = Trainer(
            Models(workers),
            self._scheduler,
            self._sampler,
            self._state.own,
            folder,
            full_training=self._serve.full_training,
        )
        self._server = Server(self._state, self._journal, trainer, self._scheduler, self._sampler, self._data, folder)
        self._samples = SampleFutures(self._sampler, self._server.write, self._serve.key_requests)
        restore(self._server, self._samples, self._journal, str(self.run.shm))
        policy = self._topology.policy
        limits = ModelLimits(vocabulary(policy.model), context_tokens(self._topology) or UNBOUNDED_CONTEXT)
        handlers = Handlers(
            self._server, self._samples, self._serve, ServedBase(policy.model, limits, self._topology.run.seed)
        )
        openai = openai_app(self._sampler, OpenAIModels(self._state.own, self._serve))
        gate = KeyGate(application(handlers, [Mount("/v1", openai)]), self._keys)
        http = GuestServer(gate, IDLE_S, listen=split_address(self._serve.listen))
        self.closing.push_async_callback(self._samples.close)
        self.closing.push_async_callback(http.stop)
        await http.start()
        self.log.info("server", url=f"http://{http.address}", models=list(self._serve.models))

    async def serve(self) -> None:
        self.keep(self._sampler.run())
        self.keep(self._sweep())
        await self._server.run()

    def request_stop(self) -> None:
        if self._ending or not self.supervised:
            super().request_stop()
            return
        self._ending = True
        self.keep(self._end())

    async def _end(self) -> None:
        """Park all models within the time limit that the launcher also uses."""
        self.ends_after("parking the clients' models")
        limit_s = stop_limit_s(self._topology)
        try:
            async with asyncio.timeout(limit_s):
                await self._server.park()
        except TimeoutError:
            self.log.warning("stopped before all models were parked", limit_s=limit_s)
        super().request_stop()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._samples.sweep()
