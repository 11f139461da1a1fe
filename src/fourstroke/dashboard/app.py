"""The web application: addresses to pages, the guard in front of them, and the server.

    request --> guard (host name, token, headers) --> route --> pages --> template --> response

Every handler only reads, runs in a thread of its own, and answers HTML. Every text goes through a template with
autoescaping; no page runs a script or loads a file that is not the dashboard's own (Content-Security-Policy).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import socket
from collections.abc import Callable
from http.cookies import SimpleCookie
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs

import uvicorn
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fourstroke.dashboard import pages
from fourstroke.dashboard.query import Query
from fourstroke.dashboard.runs import Run, Runs, RunState
from fourstroke.dashboard.serve import is_loopback
from fourstroke.dashboard.visible_text import visible
from fourstroke.errors import CodecError, ConfigError, FourstrokeError, PreflightError
from fourstroke.types import Group

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_COOKIE = "fourstroke_dashboard"
_LARGEST_LOGIN_BYTES = 4096
# Seconds between two looks at a run that goes on.
_REFRESH_S = 3


class _Guard:
    """Stands before every page: adds the headers, and turns away who may not ask.

    Without a token the ``Host`` header must name this machine, so that no other site's name can be made to lead here.
    """

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self._token is None:
            if is_loopback(_host_name(headers.get("host", ""))):
                return None
            return PlainTextResponse("this dashboard answers on loopback names alone\n", status_code=421)
        path = scope["path"]
        if path == "/login" or path.startswith("/static/") or self._is_let_in(headers):
            return None
        return _page("login.html", {"is_wrong": False}, status=401)

    def _is_let_in(self, headers: Headers) -> bool:
        assert self._token is not None
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        cookie = SimpleCookie(headers.get("cookie", "")).get(_COOKIE)
        # Both are compared whole, so that the time says nothing of which would have fitted.
        by_header = is_equal(bearer, self._token)
        by_cookie = is_equal(cookie.value if cookie else "", cookie_value(self._token))
        return by_header or by_cookie


def is_equal(given: str, wanted: str) -> bool:
    """Whether two secrets are equal, in a time that does not depend on where they differ.

    Example:
        >>> is_equal("a", "a"), is_equal("a", "b")
        (True, False)
    """
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())


def cookie_value(token: str) -> str:
    """What a browser keeps instead of the token: it opens this dashboard and shows the token to nobody.

    Example:
        >>> len(cookie_value("a" * 16))
        64
    """
    return hashlib.sha256(b"fourstroke dashboard\0" + token.encode()).hexdigest()


def _host_name(header: str) -> str:
    """The name in a ``Host`` header, without its port."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("fourstroke.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _page(template: str, values: pages.Page, *, status: int = 200) -> HTMLResponse:
    text = _environment().get_template(template).render({"refresh_s": 0, "run": None, **values})
    # What is no character at all, a lone surrogate say, must not keep the rest of a page from showing.
    return HTMLResponse(text.encode("utf-8", "backslashreplace"), status_code=status)


class _Site:
    """The handlers of one set of runs."""

    def __init__(self, runs: Runs, *, token: str | None) -> None:
        self._runs = runs
        self._token = token

    def overview(self, request: Request) -> Response:
        del request
        values = pages.overview_page(self._runs.all(), self._runs.refused)
        return _page("overview.html", {**values, "refresh_s": _REFRESH_S if values["is_live"] else 0})

    def curves(self, request: Request) -> Response:
        wanted = request.query_params.getlist("run")
        runs = self._runs.all()
        chosen = [run for run in runs if run.name in wanted] or list(runs[:1])
        values = pages.curves_page(runs, chosen)
        only = chosen[0] if len(chosen) == 1 else None
        return _page("curves.html", {**values, "run": only, "refresh_s": _REFRESH_S if values["is_live"] else 0})

    def run(self, request: Request) -> Response:
        run = self._run(request)
        return self._of_run("run.html", run, pages.run_page(run))

    def episodes(self, request: Request) -> Response:
        run = self._run(request)
        return self._of_run("episodes.html", run, pages.episodes_page(run, _query(request)))

    def group(self, request: Request) -> Response:
        run = self._run(request)
        group, incarnation, attempt = self._group(run, request)
        values = pages.group_page(run, group, incarnation=incarnation, attempt=attempt)
        return self._of_run("group.html", run, {**values, "incarnation": incarnation, "attempt": attempt})

    def episode(self, request: Request) -> Response:
        run = self._run(request)
        group, incarnation, attempt = self._group(run, request)
        member = self._member(request, group)
        values = pages.episode_page(
            run, group, incarnation=incarnation, attempt=attempt, member=member, query=_query(request)
        )
        return self._of_run("episode.html", run, values, is_settled=True)

    def text(self, request: Request) -> Response:
        run = self._run(request)
        group, incarnation, attempt = self._group(run, request)
        member = self._member(request, group)
        name = request.path_params["message"]
        position = pages.PROMPT if name == "prompt" else int(name) if name.isdecimal() and len(name) < 9 else -2
        if not pages.PROMPT <= position < len(group.members[member].episode.messages):
            raise HTTPException(404, "the episode has no such message")
        values = pages.text_page(run, group, member=member, position=position, query=_query(request))
        return self._of_run(
            "text.html", run, {**values, "incarnation": incarnation, "attempt": attempt}, is_settled=True
        )

    def timeline(self, request: Request) -> Response:
        run = self._run(request)
        return self._of_run("timeline.html", run, pages.timeline_page(run, _query(request)))

    def distributions(self, request: Request) -> Response:
        run = self._run(request)
        return self._of_run("distributions.html", run, pages.distributions_page(run))

    def weights(self, request: Request) -> Response:
        run = self._run(request)
        return self._of_run("weights.html", run, pages.weights_page(run))

    async def login(self, request: Request) -> Response:
        if self._token is None:
            return RedirectResponse("/", status_code=303)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LARGEST_LOGIN_BYTES:
                raise HTTPException(413, "that is no token")
        given = parse_qs(body.decode("ascii", "replace")).get("token", [""])[0]
        if not is_equal(given, self._token):
            return _page("login.html", {"is_wrong": True}, status=401)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(_COOKIE, cookie_value(self._token), httponly=True, samesite="strict")
        return answer

    def _run(self, request: Request) -> Run:
        run = self._runs.named(request.path_params["run"])
        if run is None:
            raise HTTPException(404, "there is no such run")
        return run

    def _group(self, run: Run, request: Request) -> tuple[Group, int, int]:
        key, incarnation, attempt = (request.path_params[name] for name in ("key", "incarnation", "attempt"))
        if not run.index.members(key, incarnation=incarnation, attempt=attempt):
            raise HTTPException(404, "the run has no such group")
        return run.group(key, incarnation=incarnation, attempt=attempt), incarnation, attempt

    def _member(self, request: Request, group: Group) -> int:
        member = cast(int, request.path_params["member"])
        if member >= len(group.members):
            raise HTTPException(404, "the group has no such member")
        return member

    def _of_run(self, template: str, run: Run, values: pages.Page, *, is_settled: bool = False) -> Response:
        is_live = run.state is RunState.RUNNING and not is_settled
        return _page(template, {**values, "run": run, "refresh_s": _REFRESH_S if is_live else 0})


def _query(request: Request) -> Query:
    return Query(dict(request.query_params))


def _not_found(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException)
    return _page("error.html", {"title": "Not here", "sentence": error.detail}, status=error.status_code)


def _unreadable(request: Request, error: Exception) -> Response:
    """A mistake of the reader's is told as one; anything else of our tree is something that cannot be read."""
    del request
    status, title = (400, "Not understood") if isinstance(error, ConfigError) else (500, "Cannot be read")
    return _page("error.html", {"title": title, "sentence": visible(str(error))}, status=status)


def make_app(runs: Runs, *, token: str | None) -> Starlette:
    """The application.

    Args:
        runs: What it shows.
        token: Readers must give it; None lets everybody in who names this machine by a loopback name.
    """
    site = _Site(runs, token=token)
    one = "/runs/{run}"
    result = one + "/groups/{key}/{incarnation:int}/{attempt:int}"
    routes = [
        Route("/", site.overview),
        Route("/curves", site.curves),
        Route("/login", site.login, methods=["POST"]),
        Route(one, site.run),
        Route(f"{one}/episodes", site.episodes),
        Route(result, site.group),
        Route(f"{result}/{{member:int}}", site.episode),
        Route(f"{result}/{{member:int}}/text/{{message}}", site.text),
        Route(f"{one}/timeline", site.timeline),
        Route(f"{one}/distributions", site.distributions),
        Route(f"{one}/weights", site.weights),
        Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(_Guard, token=token)],
        exception_handlers={HTTPException: _not_found, FourstrokeError: _unreadable, CodecError: _unreadable},
    )


def listen(runs: Runs, *, host: str, port: int, token: str | None, say: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Raises:
        PreflightError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), port))
        except OSError as error:
            raise PreflightError(
                f"{host}:{port} cannot be listened on ({error.strerror}); give another --port or --host"
            ) from error
        listener.listen()
        name = f"[{host.strip('[]')}]" if family == socket.AF_INET6 else host
        say(f"http://{name}:{listener.getsockname()[1]}/")
        config = uvicorn.Config(
            make_app(runs, token=token), log_level="warning", access_log=False, server_header=False, lifespan="off"
        )
        # It ends by the interrupt that it was asked to end by.
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
