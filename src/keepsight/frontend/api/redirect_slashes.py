"""Leads a client that typed a slash at the end of a path to the path without it."""

from urllib.parse import quote

from starlette.responses import RedirectResponse
from starlette.routing import Match, Router
from starlette.types import Receive, Scope, Send


class RedirectSlashes:
    """What a router does with a path that it does not know.

    Its own redirect would name the host and scheme by which a proxy knows the server, without the proxy's prefix.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, slash = scope["path"][:-1], scope["path"][-1:]
        if slash == "/" and self._knows({**scope, "path": path}):
            where = f"../{quote(path.rpartition('/')[2])}"
            query = scope["query_string"].decode("latin-1")
            await RedirectResponse(f"{where}?{query}" if query else where)(scope, receive, send)
        else:
            await self._router.not_found(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in self._router.routes)
