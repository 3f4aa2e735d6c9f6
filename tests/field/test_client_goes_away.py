"""A client that hangs up gives everything back within two seconds, whatever its request was doing.

Otherwise the KV pool fills with requests that nobody reads, until nothing is admitted while /health stays green.
vllm-project/vllm-ascend#16662, vllm-project/vllm#9428, sgl-project/sglang#18701, InternLM/lmdeploy#4655,
InternLM/lmdeploy#4654, InternLM/lmdeploy#4403, xLLM-AI/xllm#1926.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines import scripted_engine
from tests.support.pace import Pace
from tests.support.service import HOST, Running, eventually, script_or

ROUNDS = 200
LIMIT = 2.0
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {{}}\r\n\r\n"
HI = [{"role": "user", "content": "hi"}]


class Lab:
    """A slow service of the scripted model, and what it holds."""

    def __init__(self, delay: float, **settings: Any) -> None:
        self.pace = Pace(delay)
        settings = {"max_len": 1200, "kv_blocks": 200, **settings}
        self.engine = scripted_engine(script_or("x" * 1000), on_step=self.pace, **settings)
        self.service = Running(self.engine)

    @property
    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        stats = self.engine.stats()
        return stats.running, stats.waiting

    def idle(self) -> bool:
        """Nothing runs, waits, or holds a block or a place. Blocks that only the prefix cache keeps are free."""
        stats = self.engine.stats()
        return (
            stats.running == stats.waiting == self.service.service.gate.active == 0
            and stats.blocks_free == stats.blocks_total
        )

    def aborted(self) -> float:
        return self.service.metric("request_success_total", finished_reason="abort")

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: Any) -> None:
        self.service.__exit__()


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An ordinary hang-up is no error: nothing is logged above INFO."""
    with caplog.at_level(logging.INFO):
        yield
    loud = [f"{r.name} {r.levelname}: {r.getMessage()}" for r in caplog.records if r.levelno > logging.INFO]
    assert not loud, loud


def read_chunks(sock: socket.socket, count: int) -> None:
    """Until so many events of a stream have come."""
    seen = b""
    while seen.count(b"data: ") < count:
        piece = sock.recv(4096)
        assert piece, "the server closed first"
        seen += piece


def hang_up(sock: socket.socket, reset: bool) -> None:
    """Close; by a reset as when a process dies, or in the orderly way."""
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def best_time(service: Running) -> float:
    """Seconds of a short request, the best of some."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        status, reply = service.post(TEXT, {"prompt": "p", "max_tokens": 5, "temperature": 0})
        times.append(time.perf_counter() - started)
        assert status == 200 and reply["choices"][0]["text"] == "xxxxx"
    return min(times)


def test_two_hundred_streams_left_in_the_middle(quiet: None) -> None:
    with Lab(0.002) as lab:
        before = best_time(lab.service)
        for i in range(ROUNDS):
            chat = i % 2 == 0
            body = {"messages": HI} if chat else {"prompt": f"prompt {i % 7}"}
            sock = lab.service.send({**body, "max_tokens": 1000, "stream": True}, CHAT if chat else TEXT)
            read_chunks(sock, 2 + chat)  # chat opens with a chunk that has the role only
            assert not lab.idle()
            hang_up(sock, reset=i % 3 == 0)
            assert eventually(lab.idle, LIMIT), f"round {i}: {lab.counts}"
        assert best_time(lab.service) < 3 * before + 0.05
        assert lab.aborted() == ROUNDS
        assert lab.service.metric("request_success_total", finished_reason="error") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_while_it_waits_in_the_queue(quiet: None, stream: bool) -> None:
    with Lab(0.008, max_num_seqs=2) as lab:
        running = [lab.service.send({"prompt": f"p{i}", "max_tokens": 1000, "stream": True}) for i in range(2)]
        assert eventually(lambda: lab.counts == (2, 0))
        held = lab.engine.stats().blocks_free
        for i in range(6):
            queued = [lab.service.send({"prompt": f"q{k}", "max_tokens": 1000, "stream": stream}) for k in range(2)]
            assert eventually(lambda: lab.counts == (2, 2))
            for sock in queued:
                hang_up(sock, reset=i % 2 == 0)
            assert eventually(lambda: lab.counts == (2, 0), LIMIT), "those that run go on, those that waited are gone"
        assert lab.engine.stats().blocks_free <= held
        for sock in running:
            hang_up(sock, reset=False)
        assert eventually(lab.idle, LIMIT)
        assert lab.aborted() == 14


@pytest.mark.parametrize("stream", [True, False])
def test_during_chunked_prefill(quiet: None, stream: bool) -> None:
    """No token has come yet, so nothing is written that could fail: the server has to look."""
    with Lab(0.02, chunk_size=4) as lab:
        prompt = [5 + i % 400 for i in range(800)]  # 200 steps, 4 s
        for i in range(4):
            body = {"prompt": prompt, "max_tokens": 5, "stream": stream, "cache_salt": str(i)}
            sock = lab.service.send(body)
            assert eventually(lambda: lab.engine.stats().blocks_free < lab.engine.stats().blocks_total - 1)
            hang_up(sock, reset=i % 2 == 0)
            assert eventually(lab.idle, LIMIT)
        stats = lab.engine.stats()
        assert stats.generated_tokens == 0, "it was to be left before its first token"
        assert lab.aborted() == 4
        assert 0 < stats.prompt_tokens < 4 * len(prompt)


@pytest.mark.parametrize("stream", [True, False])
def test_while_it_is_preempted(quiet: None, stream: bool) -> None:
    with Lab(0.02, kv_blocks=8, block_size=16, max_len=128) as lab:
        for i in range(3):
            older = lab.service.send({"prompt": [5] * 30, "max_tokens": 98, "stream": True, "cache_salt": f"a{i}"})
            assert eventually(lambda: lab.counts == (1, 0))
            younger = lab.service.send({"prompt": [6] * 60, "max_tokens": 60, "stream": stream, "cache_salt": f"b{i}"})
            assert eventually(lambda: lab.counts == (2, 0)), lab.counts
            assert eventually(lambda: lab.counts == (1, 1))
            assert lab.engine.stats().preemptions == i + 1
            hang_up(younger, reset=i % 2 == 0)
            assert eventually(lambda: lab.counts[1] == 0, LIMIT)
            assert lab.counts == (1, 0), "the older one was to run on"
            hang_up(older, reset=i % 2 == 1)
            assert eventually(lab.idle, LIMIT)
        assert lab.aborted() == 6


def test_without_a_stream(quiet: None) -> None:
    """Nothing at all is written before the end."""
    with Lab(0.005) as lab:
        for i in range(12):
            chat = i % 2 == 0
            body = {"messages": HI} if chat else {"prompt": f"p{i}"}
            sock = lab.service.send({**body, "max_tokens": 1000}, CHAT if chat else TEXT)
            assert eventually(lambda: lab.counts == (1, 0))
            hang_up(sock, reset=i % 3 == 0)
            assert eventually(lab.idle, LIMIT)
        assert lab.aborted() == 12


@pytest.mark.parametrize("stream", [True, False])
def test_all_choices_of_all_prompts_are_given_up(quiet: None, stream: bool) -> None:
    with Lab(0.005) as lab:
        sock = lab.service.send({"prompt": ["a", "b", "c"], "n": 3, "max_tokens": 300, "stream": stream})
        assert eventually(lambda: lab.counts == (9, 0))
        hang_up(sock, reset=True)
        assert eventually(lab.idle, LIMIT)
        assert lab.aborted() == 3, "requests, not choices"


def test_before_the_request_is_whole(quiet: None) -> None:
    """A connection that ends in the head or in the body of a request, or never says anything."""
    head = HEAD.format(100)
    with Lab(0.0) as lab:
        for part in ("", "POST", head[:60], head, head + '{"prompt": "a'):
            for reset in (False, True):
                sock = socket.create_connection((HOST, lab.service.port), timeout=5)
                sock.sendall(part.encode())
                time.sleep(0.02)
                hang_up(sock, reset)
        assert eventually(lab.idle, LIMIT)
        best_time(lab.service)


def test_in_the_middle_of_what_is_not_read(quiet: None) -> None:
    """The client stopped reading long before: its window is full when it dies."""
    with Lab(0.0) as lab:
        for i in range(4):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect((HOST, lab.service.port))
            body = b'{"prompt": "p", "n": 8, "max_tokens": 1000, "stream": true, "logprobs": 20}'
            sock.sendall(HEAD.format(len(body)).encode() + body)
            assert eventually(lambda: lab.counts[0] == 8)
            time.sleep(0.1)
            hang_up(sock, reset=i % 2 == 0)
            assert eventually(lab.idle, LIMIT)
