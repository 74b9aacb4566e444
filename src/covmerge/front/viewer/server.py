"""The page on loopback: read only, for whoever knows its address, and for no page of anybody else.

Any program of this machine, and any page in its browser, may send requests here. So the address has a
token, requests must be for this host and port (a name that was bound to 127.0.0.1 is another host), and
what they may ask for is a table of names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from secrets import token_urlsafe
from typing import Any, cast

import yaml
from pydantic import ValidationError

from covmerge.base.errors import CovmergeError, InputError
from covmerge.base.settings import Hint
from covmerge.front.reporting.style import COLOURS
from covmerge.front.viewer.scene import Choice, Scene, recipe_of
from covmerge.plan.recipe import parse_recipe
from covmerge.plan.recipe.explain import key_path

HOST = "127.0.0.1"
_MOST_BYTES = 1 << 20  # of a request
_SECONDS = 30  # that a connection may be silent
_PAGE = {
    "": ("index.html", "text/html"),
    "view.css": ("view.css", "text/css"),
    "view.js": ("view.js", "text/javascript"),
    "prediction.js": ("prediction.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_JSON = "application/json"


class Server:
    """A page of one scene, served until it is closed.

    Attributes:
        url: where it is; the only secret, and new each time.
    """

    def __init__(self, scene: Scene, port: int = 0) -> None:
        """Listen on loopback.

        Args:
            scene: what is shown.
            port: 0: one that is free.

        Raises:
            InputError: the port is taken, or may not be used.
        """
        token = token_urlsafe(24)
        content = {name: _file(*place) for name, place in _PAGE.items()}
        content["colours.css"] = ("text/css", _colours())
        content["scene.json"] = (_JSON, json.dumps(scene.as_json(), allow_nan=False).encode())
        handler = partial(_Handler, token, content, partial(recipe_text, scene))
        try:
            self._server = _Pages((HOST, port), handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"{Hint('port', port)} cannot be listened on ({reason}): name another, or none for one "
                "that is free"
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://{HOST}:{self._server.server_port}/{token}/"

    def serve(self) -> None:
        """Answer until `close`, or an interrupt."""
        self._server.serve_forever()

    def shutdown(self) -> None:
        """End `serve`, from another thread."""
        self._server.shutdown()

    def close(self) -> None:
        """Listen no longer."""
        self._server.server_close()


def recipe_text(scene: Scene, body: bytes) -> str:
    """Return the recipe of a choice as YAML, checked as every recipe is.

    Raises:
        InputError: it is no choice, or no recipe can be made of it.
    """
    try:
        choice = Choice.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = key_path(first["loc"])
        raise InputError(f"the page's choice: {where}: {first['msg']}") from None
    found = recipe_of(choice, scene.recipe, scene.sources)
    said = found.model_dump(mode="json", exclude_defaults=True)
    said["experts"] = {
        name: expert["source"] if expert.keys() == {"source"} else expert
        for name, expert in said["experts"].items()
    }
    # What is sent is read as every recipe is, and is refused here where it would be there.
    if parse_recipe(said, origin="the page's recipe") != found:
        raise InputError("the recipe of this choice is not what it says: report this to covmerge")
    return yaml.safe_dump(said, sort_keys=False, allow_unicode=True, width=88)


class _Pages(ThreadingHTTPServer):
    """The requests, a thread each."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a page that is closed before it has asked, or has its answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = _SECONDS
    server_version = "covmerge"
    sys_version = ""

    def __init__(
        self,
        token: str,
        content: Mapping[str, tuple[str, bytes]],
        recipe: Callable[[bytes], str],
        *connection: Any,
    ) -> None:
        self._token = token
        self._content = content
        self._recipe = recipe
        super().__init__(*connection)

    def do_GET(self) -> None:
        """Send one of the page's parts."""
        name = self._asked()
        if name is None:
            return
        if name not in self._content:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        self._send(HTTPStatus.OK, *self._content[name])

    do_HEAD = do_GET  # noqa: N815 - what is sent of it ends with the headers

    def do_POST(self) -> None:
        """Send the recipe of a choice."""
        name = self._asked()
        if name is None:
            return
        if name != "recipe":
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        size = self.headers.get("Content-Length", "")
        same_origin = self.headers.get("Origin") in (None, self._origin)
        if not same_origin or self.headers.get_content_type() != _JSON:
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        if not (size.isascii() and size.isdigit() and len(size) < 9) or int(size) > _MOST_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        try:
            answer, status = {"recipe": self._recipe(self.rfile.read(int(size)))}, HTTPStatus.OK
        except CovmergeError as error:
            answer, status = {"error": str(error)}, HTTPStatus.UNPROCESSABLE_ENTITY
        self._send(status, _JSON, json.dumps(answer).encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request, or another method, without a word of it."""
        del message, explain
        self._refuse(HTTPStatus(code))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the address has the token."""

    @property
    def _origin(self) -> str:
        port = cast("ThreadingHTTPServer", self.server).server_port
        return f"http://{HOST}:{port}"

    def _asked(self) -> str | None:
        """Return what is asked for, by whoever may; else refuse, and None."""
        hosts = self.headers.get_all("Host", [])
        if hosts != [self._origin.removeprefix("http://")]:
            self._refuse(HTTPStatus.FORBIDDEN)
            return None
        _, token, name = [*self.path.split("/", 2), "", ""][:3]
        if not compare_digest(token.encode(), self._token.encode()):
            self._refuse(HTTPStatus.NOT_FOUND)
            return None
        if self.path == f"/{token}":  # what the page names lies below
            self._send(HTTPStatus.PERMANENT_REDIRECT, "text/plain", b"", Location=f"/{token}/")
            return None
        return name

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True
        self._send(status, "text/plain", f"{status.value} {status.phrase}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes, **more: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **more}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _file(name: str, kind: str) -> tuple[str, bytes]:
    return kind, (files("covmerge.front.viewer") / "page" / name).read_bytes()


def _colours() -> bytes:
    """The report's colours, of light and dark paper."""
    light = " ".join(f"--{name}: {colour.light};" for name, colour in COLOURS.items())
    dark = " ".join(f"--{name}: {colour.dark};" for name, colour in COLOURS.items())
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark} }} }}\n"
    ).encode()
