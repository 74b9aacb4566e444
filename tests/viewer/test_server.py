"""The page on loopback: for whoever knows its address, and for no page of anybody else."""

import http.client
import json
import re
import socket
import struct
import threading
from contextlib import closing
from urllib.parse import urlsplit

import pytest
import yaml

from covmerge.errors import InputError
from covmerge.front.viewer import Choice, Server, ViewJob
from covmerge.plan.recipe import parse_recipe
from tests.advised import advice
from tests.report.merges import checkpoints


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    checkpoints(folder, {"a": 0.1, "b": 0.2}, blocks=1)
    recipe = folder / "recipe.yml"
    recipe.write_text(
        "base: ./base.safetensors\nexperts: {a: ./a.safetensors, b: ./b.safetensors}\n"
    )
    return ViewJob(recipe).run()


@pytest.fixture(scope="module")
def server(scene):
    with closing(Server(scene)) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path=None, method="GET", body=None, headers=None, name=""):
    """Send a request as it is, and return status, headers and body."""
    place = urlsplit(server.url)
    with closing(http.client.HTTPConnection(place.hostname, place.port, timeout=10)) as connection:
        connection.request(
            method, (place.path + name) if path is None else path, body, headers or {}
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def post(server, choice, **headers):
    body = choice if isinstance(choice, bytes) else json.dumps(choice).encode()
    return ask(server, method="POST", name="recipe", body=body,
               headers={"Content-Type": "application/json", **headers})  # fmt: skip


def test_the_page_and_its_parts_are_there_under_a_strict_policy(server):
    kinds = {
        "": "text/html",
        "view.css": "text/css",
        "colours.css": "text/css",
        "view.js": "text/javascript",
        "prediction.js": "text/javascript",
        "scene.json": "application/json",
    }
    for name, kind in kinds.items():
        status, headers, body = ask(server, name=name)
        assert (status, headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
        assert headers["Content-Security-Policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert body
        assert ask(server, method="HEAD", name=name)[2] == b""


def test_the_address_may_lack_its_last_slash(server):
    place = urlsplit(server.url).path
    status, headers, _ = ask(server, place.rstrip("/"))
    assert (status, headers["Location"]) == (308, place)
    assert ask(server, "/another")[0] == 404


def test_it_listens_on_this_machine_alone(server):
    place = urlsplit(server.url)
    assert place.hostname == "127.0.0.1"
    own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in own - {"127.0.0.1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, place.port), timeout=2)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/scene.json",
        "/wrong/scene.json",
        "//scene.json",
        "/{token}/../../pyproject.toml",
        "/{token}/%2e%2e/%2e%2e/etc/passwd",
        "/{token}//etc/passwd",
        "/{token}/view.js/",
        "/{token}/view.js?x",
        "/{token}/recipe",
        "/%FF/",
    ],
)
def test_nothing_else_is_there(server, path):
    token = urlsplit(server.url).path.strip("/")
    assert ask(server, path.format(token=token))[0] in (400, 404)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "localhost:1", "127.0.0.1", "127.0.0.1:{port}.x"],
)
def test_a_name_bound_to_this_machine_is_refused(server, host):
    named = host.format(port=urlsplit(server.url).port)
    for method in ("GET", "POST"):
        status, _, body = ask(server, method=method, headers={"Host": named})
        assert (status, body) == (403, b"403 Forbidden\n")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "X" * 100])
def test_it_is_read_only(server, method):
    assert ask(server, method=method)[0] == 501


def test_a_choice_is_a_recipe(server):
    choice = Choice(method="task_arithmetic", weights={"a": 0.5, "b": 0.0}, scale=0.7)
    status, _, body = post(server, choice.model_dump(mode="json"))
    assert status == 200
    text = json.loads(body)["recipe"]
    found = parse_recipe(yaml.safe_load(text))
    assert found.parameters == {"scale": 0.7}
    assert {name: own.weight for name, own in found.experts.items()} == {"a": 0.5}
    assert "null" not in text


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON"),
        (b"[" * 100_000, "recursion|JSON"),
        (b'{"method": "ties", "weights": {}}', "method"),
        (b'{"method": "average", "weights": {"a": -1}}', "weights.a"),
        (b'{"method": "average", "weights": {"a": 1e999}}', "weights.a"),
        (b'{"method": "average", "weights": {"a": 1}, "out": "/"}', "out"),
        (b'{"method": "average", "weights": {"c": 1}}', "no expert 'c'"),
        (b'{"method": "average", "weights": {"a": 0}}', "all weights are 0"),
    ],
)
def test_what_is_no_choice_is_told(server, body, word):
    status, _, answer = post(server, body)
    assert status == 422
    assert re.search(word, json.loads(answer)["error"])


def test_other_pages_cannot_ask_for_recipes(server):
    good = {"method": "average", "weights": {"a": 1.0}}
    own = server.url[: server.url.index("/", 8)]
    assert post(server, good, Origin=own)[0] == 200
    for origin in ("null", "https://evil.example", "http://127.0.0.1:1"):
        assert post(server, good, Origin=origin)[0] == 403
    # What a form of another page can send without being asked.
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert post(server, good, **{"Content-Type": kind})[0] == 403


@pytest.mark.parametrize("size", ["-1", "9" * 30, "1e3", str(2**20 + 1)])
def test_a_body_has_an_honest_size(server, size):
    assert post(server, b"", **{"Content-Length": size})[0] == 413


def test_rubbish_does_not_end_it(server):
    place = urlsplit(server.url)
    for sent in (b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"a" * 70_000, b""):
        with socket.create_connection((place.hostname, place.port), timeout=5) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)
    assert ask(server)[0] == 200


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n", b"GET /%b HTTP/1.1\r\nHost: %b\r\n\r\n"])
def test_a_page_that_is_closed_early_leaves_no_traceback(scene, capfd, sent):
    """Reset before its request ends, or before its answer."""
    with closing(Server(scene)) as server:
        server._server.daemon_threads = False  # so that `close` waits for its answers
        place = urlsplit(server.url)
        thread = threading.Thread(target=server.serve)
        thread.start()
        if b"%b" in sent:
            sent %= (place.path.strip("/").encode() + b"/view.js", place.netloc.encode())
        for _ in range(20):
            with socket.create_connection((place.hostname, place.port), timeout=5) as connection:
                connection.sendall(sent)
                # Closing resets the connection, without waiting for what was sent.
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        server.shutdown()
        thread.join()
    assert capfd.readouterr() == ("", "")


def test_a_port_that_is_taken_is_told(scene, server):
    port = urlsplit(server.url).port
    said = advice("cannot be listened on ({}): name another, or none for one that is free")
    with pytest.raises(InputError, match=f"port={port} {said}"):
        Server(scene, port)
    free = Server(scene, 0)
    another = urlsplit(free.url).port
    assert another not in (0, port)
    free.close()
    Server(scene, another).close()
