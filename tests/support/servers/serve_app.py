"""An ASGI application behind a real socket, in a thread of the test process."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn


@contextmanager
def serve_app(app) -> Iterator[httpx.Client]:
    """A client of `app`, which listens on a free port of the loopback interface."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            started.set()

        async def main_loop(self):
            # As uvicorn's own, which looks every tenth of a second whether it is to end.
            ticks = 0
            while not await self.on_tick(ticks):
                ticks += 1
                await asyncio.sleep(0.01)

    server = Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert started.wait(60), "the application did not start"
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
    assert not thread.is_alive(), "the application did not stop"
