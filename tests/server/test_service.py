"""The service under load, over real sockets: capacity, /health with every place taken, clients that go away."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from device.errors import ConfigError
from server.config import ServerConfig
from server.service import open_port
from tests.support.engines import scripted_engine
from tests.support.service import HOST, Running, events, eventually, say, script_or

LONG = "x" * 1000
SEQS, QUEUE = 8, 24


def idle(service: Running) -> bool:
    stats = service.engine.stats()
    return stats.running == stats.waiting == 0 and stats.blocks_free == stats.blocks_total


@pytest.fixture
def slow() -> Iterator[Running]:
    """A step takes 10 ms; 8 requests run and 24 wait."""
    engine = scripted_engine(
        script_or(LONG), on_step=lambda plan: time.sleep(0.01), max_len=1200, kv_blocks=700, max_num_seqs=SEQS,
        max_queue=QUEUE,
    )  # fmt: skip
    with Running(engine) as service:
        yield service


def request(tokens: int = 900, stream: bool = True, prompt: Any = "p") -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "stream": stream}


def test_over_capacity_is_429_and_health_stays_quick(slow: Running) -> None:
    """With every place taken /health answers within 100 ms, and one more request is refused, not queued."""
    places = SEQS + QUEUE
    socks = [slow.send(request(prompt=f"p{i}")) for i in range(places)]
    try:
        assert eventually(lambda: slow.service.gate.active == places)
        assert eventually(lambda: slow.engine.stats().running == SEQS)
        for _ in range(20):
            status, headers, raw = slow.call("POST", "/v1/completions", request())
            assert status == 429
            assert int(headers["retry-after"]) >= 1
            error = json.loads(raw)["error"]
            assert error["code"] == "rate_limit_exceeded" and error["param"] is None
        times = []
        for _ in range(60):
            started = time.perf_counter()
            assert slow.call("GET", "/health")[0] == 200
            times.append(time.perf_counter() - started)
        assert max(times) < 0.1, f"/health took {max(times) * 1000:.0f} ms"
        assert slow.call("GET", "/metrics")[0] == 200
    finally:
        for sock in socks:
            sock.close()
    assert eventually(lambda: idle(slow), 2.0)
    assert eventually(lambda: slow.service.gate.active == 0, 2.0)
    assert slow.post("/v1/completions", request(3, stream=False))[0] == 200


def test_the_engines_own_limit_is_429_too(slow: Running) -> None:
    """``n`` choices take ``n`` places in the engine."""
    sock = slow.send({**request(), "n": SEQS + QUEUE - 1})
    assert eventually(lambda: slow.engine.stats().running == SEQS)
    status, headers, _ = slow.call("POST", "/v1/completions", {**request(), "n": 4})
    assert status == 429 and "retry-after" in headers
    sock.close()
    assert eventually(lambda: idle(slow), 2.0)


def test_tokenising_takes_a_place_too(slow: Running) -> None:
    """Long texts keep threads busy: they may not take those that /health needs."""
    gate = slow.service.gate
    for _ in range(gate.capacity):
        gate.enter()
    try:
        assert slow.post("/tokenize", {"prompt": "x"})[0] == 429
        assert slow.post("/detokenize", {"tokens": [5]})[0] == 429
        assert slow.call("GET", "/health")[0] == 200
    finally:
        for _ in range(gate.capacity):
            gate.leave()
    assert slow.post("/tokenize", {"prompt": "x"})[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_work_too(slow: Running, stream: bool) -> None:
    """The engine would go on to max_tokens for nobody. The other choice goes on to its own end."""
    body = {"prompt": "p", "max_tokens": 900, "extra": say("one two" + "x" * 900), "stop": "two", "stream": stream}
    slow.call("POST", "/v1/completions", body)
    assert eventually(lambda: idle(slow), 1.0)
    assert slow.engine.stats().generated_tokens < 7 + 30


def test_watchdog_ignores_an_idle_engine() -> None:
    with Running(scripted_engine(), watchdog_timeout=0.1) as service:
        time.sleep(0.5)
        assert service.call("GET", "/health")[0] == 200


def test_a_long_list_of_prompts_leaves_room_for_others(slow: Running) -> None:
    """Its follow-ups take half of the queue at most, however many prompts still wait."""
    answered: list[int] = []
    body = request(8, stream=False, prompt=[f"many {i}" for i in range(400)])
    many = threading.Thread(target=lambda: answered.append(slow.post("/v1/completions", body)[0]))
    many.start()
    try:
        assert eventually(lambda: slow.engine.stats().waiting > 0)
        for i in range(12):
            assert slow.post("/v1/completions", request(2, stream=False, prompt=f"other {i}"))[0] == 200
            assert many.is_alive(), "nothing was shown: the list was done before"
    finally:
        many.join()
    assert answered == [200]


def test_a_slow_reader_does_not_hold_up_the_others(slow: Running) -> None:
    """One client stops reading; another one's stream goes on."""
    lazy = slow.send(request())
    response = slow.open("/v1/completions", request(20))
    with response:
        assert [event for event in events(response)][-1] == "[DONE]"
    lazy.close()
    assert eventually(lambda: idle(slow), 2.0)


def test_a_reply_that_is_not_sent_yet_is_sent_before_the_end() -> None:
    """A client that reads slowly gets all of it, although the service was told to end meanwhile."""
    with Running(scripted_engine(), max_body_bytes=8 << 20) as service:
        word = service.engine.tokenizer.encode(" cat", add_special_tokens=False) if service.engine.tokenizer else []
        body = json.dumps({"tokens": word * 500_000}).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((HOST, service.port))
            head = (
                f"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            )
            sock.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
            assert sock.recv(10) == b"HTTP/1.1 2"
            assert eventually(lambda: service.service.gate.active == 0)
            service.service.request_stop()
            time.sleep(0.3)
            received = b""
            while chunk := sock.recv(1 << 20):
                received += chunk
        assert received.count(b" cat") == 500_000 and received.endswith(b'"}')
        assert service.wait(10) == 0


def test_pipelined_requests_are_answered_in_order(slow: Running) -> None:
    bodies = [json.dumps({"prompt": "p", "extra": say(text)}).encode() for text in ("one", "two")]
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    with socket.create_connection((HOST, slow.port), timeout=10) as sock:
        sock.sendall(b"".join(head.format(len(body)).encode() + body for body in bodies))
        received = b""
        while b'"two"' not in received:
            chunk = sock.recv(65536)
            assert chunk
            received += chunk
    assert received.index(b'"one"') < received.index(b'"two"')


def test_connections_are_kept_alive(slow: Running) -> None:
    connection = http.client.HTTPConnection(HOST, slow.port, timeout=10)
    connection.connect()
    used = connection.sock
    for _ in range(5):
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        assert connection.sock is used
    connection.close()


def test_keep_alive_comments_while_a_stream_waits(slow: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.app.KEEP_ALIVE_SECONDS", 0.2)
    busy = [slow.send(request(prompt=f"p{i}")) for i in range(SEQS)]
    assert eventually(lambda: slow.engine.stats().running == SEQS)
    waiting = slow.send(request(5))
    waiting.settimeout(5)
    received = b""
    while b": keep-alive\n\n" not in received:
        received += waiting.recv(65536)
    for sock in [*busy, waiting]:
        sock.close()
    assert eventually(lambda: idle(slow), 2.0)


def test_ordinary_hang_ups_are_no_errors(slow: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            sock = slow.send(request())
            sock.recv(200)
            sock.close()
        assert eventually(lambda: idle(slow), 2.0)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_many_clients_that_come_and_go(slow: Running) -> None:
    """Random aborts among whole answers, from many threads; at the end nothing is held."""
    failures: list[str] = []

    def client(number: int) -> None:
        for round in range(8):
            if (number + round) % 3 == 0:
                sock = slow.send(request(prompt=f"{number} {round}"))
                if (number + round) % 2:
                    sock.recv(100)
                sock.close()
                continue
            status, reply = slow.post("/v1/completions", request(4, stream=False, prompt=f"{number} {round}"))
            if status != 200 or reply["choices"][0]["text"] != "xxxx":
                failures.append(f"{status} {reply}")

    threads = [threading.Thread(target=client, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert eventually(lambda: idle(slow), 2.0)
    assert eventually(lambda: slow.service.gate.active == 0, 2.0)


# ---------------------------------------------------------------- the port


def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            open_port(ServerConfig(port=port))


def test_a_bound_port_refuses_connections_until_it_is_served() -> None:
    with open_port(ServerConfig(port=0)) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname(), timeout=1)


@pytest.mark.parametrize(("host", "words"), [("nosuch.invalid", "not known"), ("203.0.113.7", "cannot listen")])
def test_addresses_that_cannot_be_had(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_port(ServerConfig(host=host, no_api_key=True))


def test_other_addresses_need_a_key() -> None:
    with pytest.raises(ConfigError, match="API key"):
        ServerConfig(host="0.0.0.0")
    assert ServerConfig(host="0.0.0.0", api_key="k").api_key == "k"
    assert ServerConfig(host="0.0.0.0", no_api_key=True).no_api_key
