"""The middleware in front of any app: request ids, CORS, keys and limits."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http.access import Access
from radixcache.runtime.server.observe.request_log import REQUEST_ID, RequestLog


def install(app: Starlette, options: ServerArgs) -> None:
    """Put the middleware in front of `app`; what is added last runs first."""
    app.add_middleware(Access, options=options)
    if options.allowed_origins:  # outside of Access: a preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[*options.allowed_origins],
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    app.add_middleware(RequestLog, access_log=options.access_log)
