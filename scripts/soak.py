"""Load without pause: many connections send requests, some hang up at random; nothing may leak, cross or fail.

    python scripts/soak.py [--minutes 2] [--connections 32] [--url http://127.0.0.1:8000 | -- JUMAR SERVE ARGUMENTS]

Without --url it starts ``jumar serve`` itself (default: the tiny model of the tests, in float64, so that the answer to
a greedy or seeded prompt is one and the same whatever it is batched with). Exit code 1 when

* a request failed that was not hung up on purpose, or an answer differs from the first answer to the same request,
* /health took longer than 100 ms (asked 20 times a second from a process of its own),
* after the load blocks are held, a gauge is not back at zero, or the service does not end with exit code 0.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    str(ROOT / "tests/data/models/tiny"), "--tokenizer", str(ROOT / "tests/data/tiny_tokenizer"), "--dtype", "float64",
    "--kv-blocks", "96", "--max-num-seqs", "16", "--max-queue", "64", "--speculate", "ngram", "--threads", "1",
]  # fmt: skip
WORDS = re.findall(r"\w+", "the of and to in is that it was for on are with as his they be at one have this from or")


def bodies(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """The requests that are sent over and over: their answers are known after the first time."""
    out = []
    for i in range(48):
        text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 40)))
        body: dict[str, Any] = {"max_tokens": rng.randrange(1, 48), "temperature": 0}
        if i % 3 == 0:
            body |= {"temperature": 1.0, "seed": i, "top_p": 0.9, "n": rng.choice([1, 2])}
        if i % 5 == 0:
            body |= {"presence_penalty": 0.5, "logprobs": True if i % 2 else 2}
        if i % 7 == 0:
            body |= {"stop": ["e", "zz"]}
        if i % 2:
            if "logprobs" in body:
                body["logprobs"] = True
            out.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}))
        else:
            if "logprobs" in body:
                body["logprobs"] = 2
            out.append(("/v1/completions", body | {"prompt": text}))
    return out


def text_of(reply: dict[str, Any]) -> list[Any]:
    """What must be the same each time: texts and reasons by choice."""
    choices = sorted(reply["choices"], key=lambda c: c["index"])
    return [[c.get("text") if "text" in c else c["message"]["content"], c["finish_reason"]] for c in choices]


class Load:
    """Shared by the connections. ``failures`` holds what went wrong, in words."""

    def __init__(self, address: tuple[str, int], until: float, seed: int, key: str | None = None) -> None:
        self.address = address
        self.until = until
        self.bodies = bodies(random.Random(seed))
        self.known: dict[tuple[int, str], Any] = {}
        self.lock = threading.Lock()
        self.done = self.hung_up = self.refused = 0
        self.failures: list[str] = []
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def connection(self, seed: int) -> None:
        """One client: requests without pause until the time is over."""
        rng = random.Random(seed)
        client: http.client.HTTPConnection | None = None
        while time.monotonic() < self.until:
            client = client or http.client.HTTPConnection(*self.address, timeout=60)
            try:
                keep = self.one(client, rng)
            except Exception as error:
                keep = False
                self.fail(f"{type(error).__name__}: {error}")
            if not keep:
                client.close()
                client = None

    def one(self, client: http.client.HTTPConnection, rng: random.Random) -> bool:
        """One request. False when the connection is used up."""
        which = rng.randrange(len(self.bodies))
        path, body = self.bodies[which]
        stream = rng.random() < 0.5
        client.request("POST", path, json.dumps(body | {"stream": stream}), self.headers)
        if rng.random() < 0.1:  # gone before the first byte
            time.sleep(rng.random() * 0.05)
            return self.hang_up()
        response = client.getresponse()
        if response.status == 429:
            response.read()
            with self.lock:
                self.refused += 1
            time.sleep(0.05)
            return True
        if response.status != 200:
            self.fail(f"status {response.status}: {response.read()[:300]!r}")
            return False
        if not stream:
            self.compare(which, "whole", text_of(json.loads(response.read())))
            return True
        return self.streamed(response, which, rng)

    def streamed(self, response: http.client.HTTPResponse, which: int, rng: random.Random) -> bool:
        leave_after = rng.randrange(1, 20) if rng.random() < 0.3 else None
        texts: dict[int, list[str]] = {}
        reasons: dict[int, str] = {}
        ended = False
        for count, line in enumerate(iter(response.readline, b"")):
            if not line.startswith(b"data: "):
                continue
            if leave_after is not None and count > leave_after:
                return self.hang_up()
            if line.strip() == b"data: [DONE]":
                ended = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self.fail(f"a stream broke off: {chunk['error']}")
                return False
            for choice in chunk["choices"]:
                piece = choice.get("text") if "text" in choice else choice["delta"].get("content")
                texts.setdefault(choice["index"], []).append(piece or "")
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
        if not ended:
            self.fail("a stream ended without [DONE]")
        self.compare(which, "stream", [["".join(texts[i]), reasons.get(i)] for i in sorted(texts)])
        return True

    def hang_up(self) -> bool:
        with self.lock:
            self.hung_up += 1
        return False

    def compare(self, which: int, how: str, got: Any) -> None:
        with self.lock:
            self.done += 1
            want = self.known.setdefault((which, "answer"), got)
        if got != want:
            self.fail(f"request {which} ({how}) was answered {got!r}, before {want!r}")

    def fail(self, text: str) -> None:
        with self.lock:
            self.failures.append(text)


def watch_health(address: tuple[str, int], seconds: float, out: Any) -> None:
    """In a process of its own: how long /health takes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        begin = time.monotonic()
        client = http.client.HTTPConnection(*address, timeout=10)
        try:
            client.request("GET", "/health")
            status = client.getresponse().status
        except OSError:
            status = 0
        client.close()
        times.append(time.monotonic() - begin if status == 200 else 99.0)
        time.sleep(0.05)
    out.send(times)


def start(arguments: list[str]) -> tuple[subprocess.Popen[str], str]:
    """``jumar serve`` and its URL."""
    command = [sys.executable, "-m", "server.cli", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"on (http://[^/\s]+)", line):
            threading.Thread(target=lambda: [None for _ in process.stdout or ()], daemon=True).start()
            return process, found[1]
    raise SystemExit("the service did not start:\n" + "".join(lines))


def gauges(address: tuple[str, int], headers: dict[str, str]) -> dict[str, float]:
    client = http.client.HTTPConnection(*address, timeout=10)
    client.request("GET", "/metrics", headers=headers)
    text = client.getresponse().read().decode()
    client.close()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {n: float(m[1]) for n in names if (m := re.search(rf"^jumar:{n}{{.*}} (\S+)$", text, re.M))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="a service that runs already; its answers must not depend on the batch")
    parser.add_argument("--api-key")
    parser.add_argument("--health-limit", type=float, default=0.1, help="seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("serve", nargs="*", help="arguments for jumar serve, after --")
    args = parser.parse_args()
    process, url = (None, args.url) if args.url else start(args.serve or TINY)
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    seconds = args.minutes * 60
    load = Load(address, time.monotonic() + seconds, args.seed, args.api_key)
    mine, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    health = multiprocessing.get_context("spawn").Process(target=watch_health, args=(address, seconds, theirs))
    health.start()
    threads = [threading.Thread(target=load.connection, args=(args.seed * 1000 + i,)) for i in range(args.connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = mine.recv()
    health.join()
    rest: dict[str, float] = {}
    for _ in range(20):
        rest = gauges(address, load.headers)
        if len(rest) == 3 and not any(rest.values()):
            break
        time.sleep(0.25)
    problems = load.failures
    if len(rest) != 3 or any(rest.values()):
        problems.append(f"5 s after the load the gauges stand at {rest}")
    if max(times) > args.health_limit:
        slow = sum(t > args.health_limit for t in times)
        problems.append(f"/health took up to {max(times) * 1000:.0f} ms ({slow} of {len(times)} above the limit)")
    if process is not None:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        if code:
            problems.append(f"the service ended with exit code {code}")
    print(f"{load.done} answered, {load.hung_up} hung up on, {load.refused} refused (429), {len(load.failures)} failed")
    print(f"/health median {statistics.median(times) * 1000:.1f} ms, slowest {max(times) * 1000:.0f} ms "
          f"of {len(times)}; gauges {rest}")  # fmt: skip
    for text in problems[:20]:
        print("PROBLEM:", text)
    if args.json:
        row = {"metric": "soak", "ours": load.done, "unit": "requests", "limit": 200, "health_ms": max(times) * 1000}
        args.json.write_text(json.dumps([row | {"problems": problems}], indent=1))
    return 1 if problems or not load.done else 0


if __name__ == "__main__":
    sys.exit(main())
