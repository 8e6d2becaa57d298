"""A frontend host with a plain application, so that these tests are of processes.

`python -m repertory.tests.served.plain_frontend`. `POST /generate` takes `{"prompt", "max_tokens"}` and streams lines of token
ids, each as it comes; the last line is `end REASON`, or `error KIND` where the engine failed. A request that is refused at
once gets its error's status.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from repertory import RepertoryError, RequestStream, SamplingParams
from repertory.actors.frontend_host import main
from repertory.actors.frontends.face import EngineFace

COMMAND = (sys.executable, "-m", "repertory.tests.served.plain_frontend")


def make_app(engine: EngineFace, *, is_draining: Callable[[], bool]) -> Starlette:
    async def generate(request: Request) -> Response:
        if is_draining():
            return PlainTextResponse("draining", 503)
        body = await request.json()
        params = SamplingParams(temperature=0.0, max_tokens=body.get("max_tokens"), ignore_eos=True, output_kind="delta")
        try:
            stream = engine.generate(body["prompt"], params)
        except RepertoryError as error:
            return PlainTextResponse(str(error), error.http_status)
        return StreamingResponse(lines(stream))

    async def lines(stream: RequestStream) -> AsyncIterator[str]:
        try:
            async with stream:
                async for output in stream:
                    yield json.dumps(output.outputs[0].token_ids) + "\n"
                    if output.finished:
                        yield f"end {output.outputs[0].finish_reason}\n"
        except RepertoryError as error:
            yield f"error {type(error).__name__}\n"

    async def health(request: Request) -> Response:
        try:
            await engine.check_health()
        except RepertoryError as error:
            return PlainTextResponse(str(error), error.http_status)
        return JSONResponse({"pid": os.getpid()})

    async def audit(request: Request) -> Response:
        return JSONResponse(await engine.audit())

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/health", health),
        Route("/audit", audit),
    ]
    return Starlette(routes=routes)


if __name__ == "__main__":
    status = main(make_app)
    sys.stderr.flush()
    os._exit(status)
