"""The web service, which serves its run's page to browsers (`monitor.web`)."""

from __future__ import annotations

from services.web.application import application
from services.web.page import Page
from shared import topology as topologies
from shared.actor.service import Service
from shared.guest_server import GuestServer, Secret
from shared.rpc.errors import BadInput
from shared.rundir import RunDir
from shared.topology.monitor import TokenError, Web, read_token, split_address

IDLE_S = 60
"""Maximum time, in seconds, between two parts of a request, and between two requests on a connection."""
MAX_CONNECTIONS = 256


class WebService(Service):
    """Serves the page of a run. Nothing waits for it."""

    NAME = "web"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        web = topologies.load_resolved(run.topology).monitor.web or Web()
        try:
            token, operator = (
                Secret(read_token(file)) if file is not None else None for file in (web.token, web.operator_token)
            )
        except TokenError as error:
            raise BadInput(f"monitor.web: {error}") from error
        self._page = Page(run.path, operable=operator is not None)
        self._server = server_of(self._page, split_address(web.listen), token, operator)

    async def start(self) -> None:
        self.closing.push_async_callback(self._server.stop)
        await self._server.start()
        self.log.info("page", url=f"http://{self._server.address}/")

    async def serve(self) -> None:
        await self._page.run()


def server_of(page: Page, listen: tuple[str, int], token: Secret | None, operator: Secret | None) -> GuestServer:
    """Return a server for a page. The caller must start it."""
    return GuestServer(application(page, token, operator), IDLE_S, listen=listen, most_connections=MAX_CONNECTIONS)
