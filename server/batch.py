"""A file of requests in OpenAI's batch format, answered offline.

Format: https://platform.openai.com/docs/guides/batch. An input line is ``{"custom_id", "method", "url", "body"}``, an
output line ``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``. Answers are written in
the order of the requests while many are computed at once, each line whole, so that the output of a run that was broken
off is a beginning of the full output: the next run repairs a torn last line and goes on behind it. A request that
cannot be served is a line with ``error`` and the HTTP status it would have had.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from device.errors import ConfigError, JumarError, RequestRejected
from server.answers import Answers
from server.errors import body_of
from server.fields import bad, parse_object, type_name
from server.gate import Gate
from server.prepare import Preparer
from server.responses import dumps

if TYPE_CHECKING:
    from runtime.engine import Engine

MAX_WORKERS = 64
_BEGIN = b'{"id"'
"""Of every answer."""


@dataclass(slots=True)
class Tally:
    """What a run did. Tokens are output tokens."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input. ``custom_id``: None where the line has none that can be read."""

    number: int
    raw: bytes
    custom_id: Any

    @classmethod
    def read(cls, number: int, raw: bytes) -> Line:
        """Never fails: what is wrong with a line is said in its answer."""
        try:
            value = json.loads(raw)
            custom_id = value.get("custom_id") if isinstance(value, dict) else None
            dumps(custom_id).encode()  # NaN and lone surrogates cannot be written back
        except (ValueError, RecursionError):
            custom_id = None
        return cls(number, raw, custom_id)


def read_lines(path: Path) -> list[Line]:
    """The requests of a file or pipe, of standard input where it is ``-``; blank lines are none."""
    raw = (sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()).splitlines()
    return [Line.read(number, text) for number, text in enumerate(raw, 1) if text.strip()]


def check_files(source: Path, output: Path) -> None:
    """What can be known to fail before a model is loaded. ConfigError."""
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}; make it first")
    if not output.exists():
        return
    if not output.is_file():
        raise ConfigError(
            f"--output {output} is no regular file: it is read back when a run is gone on with; name another"
        )
    if str(source) != "-" and output.samefile(source):
        raise ConfigError(f"--input and --output are the same file, {output}; name another --output")


def resume(path: Path, lines: list[Line]) -> int:
    """How many requests the output file answers already; cuts a torn last line off.

    ConfigError when it is not the beginning of an output for these requests: nothing is overwritten.
    """
    if not path.exists():
        return 0
    whole = 0
    done = 0
    with path.open("rb+") as file:
        for raw in file:
            answer = _complete(raw)
            if answer is None:
                if file.read(1) or not _torn(raw):
                    raise ConfigError(
                        f"{path} line {done + 1} is no answer; move the file away or name another --output"
                    )
                break
            if done >= len(lines) or answer.get("custom_id") != lines[done].custom_id:
                raise ConfigError(
                    f"{path} line {done + 1} does not answer request {done + 1} of the input (custom_id "
                    f"{answer.get('custom_id')!r}); it belongs to another input: name another --output"
                )
            done += 1
            whole += len(raw)
        file.truncate(whole)
    return done


def _torn(raw: bytes) -> bool:
    """Whether a last line is the beginning of an answer: what else a file ends with is not ours to cut off."""
    return not raw.endswith(b"\n") and raw[: len(_BEGIN)] == _BEGIN[: len(raw)]


def _complete(raw: bytes) -> dict[str, Any] | None:
    """The answer in an output line, None for a torn one."""
    if not raw.endswith(b"\n"):
        return None
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "custom_id" in value and "response" in value else None


class Batch:
    """Answers lines with an engine that has been started. model: its name in the requests."""

    def __init__(self, engine: Engine, model: str, fingerprint: str) -> None:
        self._engine = engine
        self._prepare = Preparer(engine, model, fingerprint)
        self._workers = min(MAX_WORKERS, 2 * engine.config.max_num_seqs)
        self._gate = Gate(self._workers)
        self._endpoints = {
            "/v1/chat/completions": self._prepare.chat,
            "/v1/completions": self._prepare.completions,
        }

    def run(self, lines: list[Line], output: Path, progress: Callable[[Tally], None] = lambda tally: None) -> Tally:
        """Append the answers that ``output`` lacks. ConfigError as ``resume``; JumarError when the engine fails."""
        tally = Tally(skipped=resume(output, lines))
        progress(tally)
        with output.open("ab") as file:
            for answer in self._answers(lines[tally.skipped :]):
                file.write(dumps(answer).encode() + b"\n")
                file.flush()
                if answer["error"] is None:
                    tally.answered += 1
                    tally.tokens += answer["response"]["body"]["usage"]["completion_tokens"]
                else:
                    tally.failed += 1
                progress(tally)
        return tally

    def _answers(self, lines: list[Line]) -> Iterator[dict[str, Any]]:
        """In order; a bounded number is worked on ahead."""
        pending: deque[Future[dict[str, Any]]] = deque()
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="jumar-batch")
        try:
            for line in lines:
                if len(pending) >= 2 * self._workers:
                    yield pending.popleft().result()
                pending.append(pool.submit(self.answer, line))
            while pending:
                yield pending.popleft().result()
        except BaseException:
            self._gate.failure = "the run was ended"  # workers that wait for the engine see it
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def answer(self, line: Line) -> dict[str, Any]:
        """The output line for one input line."""
        label = f"batch_req_{uuid.uuid4().hex}"
        try:
            status, body, error = 200, self._serve(line, label), None
        except RequestRejected as refused:
            if self._engine.state != "ready":
                raise JumarError(f"the engine ended: {self._engine.failure or self._engine.state}") from refused
            status, body = refused.status, body_of(refused)
            error = {"code": body["error"]["code"] or "invalid_request", "message": body["error"]["message"]}
        response = {"status_code": status, "request_id": label, "body": body}
        return {"id": label, "custom_id": line.custom_id, "response": response, "error": error}

    def _serve(self, line: Line, label: str) -> dict[str, Any]:
        request = parse_object(line.raw)
        if not isinstance(line.custom_id, str):
            raise bad("custom_id", f"line {line.number}: custom_id must be a string of valid Unicode")
        if request.get("method", "POST") != "POST":
            raise bad("method", f"line {line.number}: method must be POST")
        prepare = self._endpoints.get(str(request.get("url")))
        if prepare is None:
            raise bad("url", f"line {line.number}: url must be one of {', '.join(self._endpoints)}")
        body = request.get("body")
        if not isinstance(body, dict):
            raise bad("body", f"line {line.number}: body must be an object, not {type_name(body)}")
        work = prepare(body, label)
        if work.common.stream:
            raise bad("stream", "stream is not possible in a file of requests; leave it out")
        answers = None
        try:
            answers = Answers(self._engine, self._gate, work.tasks, queue_limit=False)
            return work.body(answers)
        except RequestRejected as error:
            error.param = work.name_of(error.param)
            raise
        finally:
            if answers is not None:
                answers.close()
