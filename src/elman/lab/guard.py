"""Who may come in: the page this server sent, in the browser that was given the token.

A page from elsewhere can make a browser send requests here, and a name that its owner points at
127.0.0.1 makes such a page seem to come from here ("rebinding"). So, before anything else is done:

    Host            one of this server's own names, letter for letter
    Origin          this server, where a browser says it, and said for whatever is not a GET
    Sec-Fetch-Site  the page itself, or an address typed by the user, where a browser says it
    cookie          HttpOnly, SameSite=Strict; set by the address with the token in it

No other origin is ever allowed (no CORS), nothing is framed, and no inline script runs.
"""

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie
from typing import Any, final
from urllib.parse import parse_qs

from starlette.responses import PlainTextResponse, RedirectResponse, Response

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
READING = ("GET", "HEAD")


@final
class Guard:
    """The application behind its door (ASGI)."""

    def __init__(self, app: Any, token: str, names: list[str]) -> None:
        """`names` are the `host:port` that this server goes by."""
        self.app, self.token, self.names = app, token, frozenset(names)
        port = names[0].rsplit(":", 1)[1]
        self.cookie = f"elman-lab-{port}"  # cookies know no ports: two labs must not share one
        self.pass_ = hashlib.sha256(b"elman lab " + token.encode()).hexdigest()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            answer = self._answer(scope)
            await (answer or self.app)(scope, receive, _with_headers(send))
        else:  # there are no WebSockets here, from anywhere
            await send({"type": "websocket.close", "code": 1008, "reason": "no WebSockets here"})

    def _answer(self, scope: Any) -> Response | None:
        """What is said at the door; None: come in."""
        headers = [(name.decode("latin-1"), v.decode("latin-1")) for name, v in scope["headers"]]
        if problem := self._foreign(scope["method"], headers):
            return PlainTextResponse(problem, 403)
        if scope["path"] == "/" and scope["method"] == "GET" and scope["query_string"]:
            return self._admit(scope)
        if not self._knows(headers):
            return PlainTextResponse(
                "This is elman's lab. Open the address that `elman lab` printed: it has the token.",
                401,
            )
        return None

    def _foreign(self, method: str, headers: list[tuple[str, str]]) -> str:
        """Why a request does not come from our own page; empty: it does."""
        hosts, origins, sites = (
            [value for key, value in headers if key == name]
            for name in ("host", "origin", "sec-fetch-site")
        )
        if len(hosts) != 1 or hosts[0].lower() not in self.names:
            return "this server does not go by that name"
        if len(origins) != (0 if method in READING and not origins else 1):
            return "a request that changes something must say where it comes from"
        if any(o not in {f"http://{name}" for name in self.names} for o in origins):
            return "requests from other pages are refused"
        if any(site not in ("same-origin", "none") for site in sites):
            return "requests from other sites are refused"
        return ""

    def _admit(self, scope: Any) -> Response:
        """The address with the token becomes a cookie, and the token leaves the address."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return PlainTextResponse("That token is not this lab's.", 403)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self.cookie, self.pass_, httponly=True, samesite="strict", path="/")
        return answer

    def _knows(self, headers: list[tuple[str, str]]) -> bool:
        for value in (value for name, value in headers if name == "cookie"):
            try:
                given = SimpleCookie(value).get(self.cookie)
            except CookieError:
                continue
            if given and hmac.compare_digest(given.value.encode(), self.pass_.encode()):
                return True
        return False


def _with_headers(send: Any) -> Any:
    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message.get("headers", ())}
            extra = [
                (name.encode(), value.encode())
                for name, value in HEADERS.items()
                if name.encode() not in own
            ]
            message = message | {"headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return sent
