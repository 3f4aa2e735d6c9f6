"""The Flask application over an engine: routes, authentication, admission, and the life of a request.

A view reads everything from ``request`` before its generator starts (the request is gone by then), takes a place at the
gate, submits to the engine while a refusal can still be an HTTP status, and only then begins to answer. The place and
the engine's blocks are given back when the reply is closed, whatever became of it.
"""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flask import Flask, Response, g, request

from device.errors import RequestRejected
from runtime.chat import encode_prompt
from runtime.tokenizer import Tokenizer
from server import errors, protocol
from server.answers import Answers, ClientGone
from server.channel import ON_HANG_UP
from server.fields import parse_object
from server.gate import Gate
from server.prepare import Prepared, Preparer, encode_conversation
from server.responses import DONE, KEEP_ALIVE, dumps, event

if TYPE_CHECKING:
    from runtime.engine import Engine
    from server.metrics import Metrics

log = logging.getLogger("jumar.server")

KEEP_ALIVE_SECONDS = 15.0
MAX_LABEL = 128
CLIENT_CLOSED = 499
"""What nginx logs for a client that hung up; nobody receives it."""


@dataclass(frozen=True, slots=True)
class AppConfig:
    """model: name in the API. fingerprint: ``system_fingerprint``. allow_extra: take the field ``extra`` of a request
    as inputs for the model (the scripted model of the tests)."""

    model: str
    version: str
    fingerprint: str
    api_key: str | None = None
    max_body_bytes: int = 2 << 20
    allow_extra: bool = False


def create_app(engine: Engine, gate: Gate, metrics: Metrics, config: AppConfig) -> Flask:
    """The WSGI application. The engine must have been started and have a tokenizer."""
    app = Flask("jumar", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_bytes
    errors.install(app)
    api = Api(engine, gate, metrics, config)
    app.before_request(api.before)
    app.after_request(api.after)
    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("GET", "/health", api.ready),
        ("GET", "/health/ready", api.ready),
        ("GET", "/health/live", api.live),
        ("GET", "/metrics", api.metrics),
        ("GET", "/version", api.version),
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/<path:name>", api.model),
        ("POST", "/v1/chat/completions", api.chat),
        ("POST", "/v1/completions", api.completions),
        ("POST", "/tokenize", api.tokenize),
        ("POST", "/detokenize", api.detokenize),
    ]
    for method, path, view in routes:
        app.add_url_rule(path, f"{method} {path}", view, methods=[method])
    return app


def clean_label(given: str | None) -> str:
    """A client's ``X-Request-Id`` as a label for logs and the reply's header: printable ASCII only, cut; never a key.
    A request without one gets its own."""
    text = "".join(c for c in (given or "")[: 4 * MAX_LABEL] if " " < c <= "~")[:MAX_LABEL]
    return text or uuid.uuid4().hex


class Api:
    """The views, and what they share."""

    def __init__(self, engine: Engine, gate: Gate, metrics: Metrics, config: AppConfig) -> None:
        if engine.tokenizer is None:
            raise ValueError("the HTTP service needs a model with a tokenizer")
        self._engine = engine
        self._tokenizer: Tokenizer = engine.tokenizer
        self._gate = gate
        self._metrics = metrics
        self._config = config
        self._created = int(time.time())
        self._prepare = Preparer(engine, config.model, config.fingerprint, allow_extra=config.allow_extra)
        self._key = None if config.api_key is None else config.api_key.encode()

    # ------------------------------------------------------------ every request

    def before(self) -> None:
        """Label the request, and ask for the key. /health needs none: probes have none."""
        g.label = clean_label(request.headers.get("X-Request-Id"))
        if self._key is None or request.path == "/health" or request.path.startswith("/health/"):
            return
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        given = key.strip().encode("utf-8", "replace")
        if kind.lower() != "bearer" or not hmac.compare_digest(given, self._key):
            raise RequestRejected(
                "a valid API key is needed: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                status=401,
            )

    def after(self, response: Response) -> Response:
        """The label goes back with the reply."""
        response.headers["X-Request-Id"] = g.get("label") or clean_label(None)
        return response

    # ------------------------------------------------------------ about the service

    def ready(self) -> Response:
        """200 while new work is taken; 503 while draining or failed. For load balancers and readiness probes."""
        gate = self._gate
        if gate.ready:
            return _json({"status": "ready", "model": self._config.model})
        status = "failed" if gate.failure is not None else "draining"
        return _json({"status": status, "model": self._config.model, "reason": gate.failure}, 503)

    def live(self) -> Response:
        """200 unless the process must be replaced; a draining one is alive. For liveness probes."""
        failure = self._gate.failure
        return _json({"status": "live" if failure is None else "failed", "reason": failure}, 503 if failure else 200)

    def metrics(self) -> Response:
        """Prometheus metrics."""
        body, content_type = self._metrics.render(request.headers.get("Accept"))
        return Response(body, content_type=content_type)

    def version(self) -> Response:
        """The version of Jumar."""
        return _json({"version": self._config.version})

    def models(self) -> Response:
        """The list of the one model."""
        return _json({"object": "list", "data": [self._model_card()]})

    def model(self, name: str) -> Response:
        """One model; 404 for another than the one served."""
        protocol.reject_model(name, self._config.model)
        return _json(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._config.model,
            "object": "model",
            "created": self._created,
            "owned_by": "jumar",
            "max_model_len": self._engine.max_model_len,
        }

    # ------------------------------------------------------------ tokens

    def tokenize(self) -> Response:
        """Text or messages to ids, by the functions that generation uses."""
        with Place(self._gate):
            body = protocol.parse_tokenize(_body())
            protocol.reject_model(body.model, self._config.model)
            if body.conversation is not None:
                ids = encode_conversation(self._tokenizer, body.conversation)
            else:
                ids = encode_prompt(self._tokenizer, body.prompt or "", body.add_special_tokens)
            reply: dict[str, Any] = {"count": len(ids), "max_model_len": self._engine.max_model_len, "tokens": ids}
            if body.return_token_strs:
                reply["token_strs"] = [self._tokenizer.token_text(i) for i in ids]
            return _json(reply)

    def detokenize(self) -> Response:
        """Ids to text, special tokens written out."""
        with Place(self._gate):
            body = protocol.parse_detokenize(_body())
            protocol.reject_model(body.model, self._config.model)
            return _json({"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)})

    # ------------------------------------------------------------ generation

    def chat(self) -> Response:
        """``POST /v1/chat/completions``."""
        return self._generate(self._prepare.chat)

    def completions(self) -> Response:
        """``POST /v1/completions``."""
        return self._generate(self._prepare.completions)

    def _generate(self, prepare: Callable[[dict[str, Any], str], Prepared]) -> Response:
        with Place(self._gate) as place:
            work = prepare(_body(), g.label)
            try:
                return self._answer(place, work)
            except RequestRejected as error:
                error.param = work.name_of(error.param)
                raise

    def _answer(self, place: Place, work: Prepared) -> Response:
        label: str = g.label
        gone = request.environ.get("waitress.client_disconnected", lambda: False)
        answers = Answers(self._engine, self._gate, work.tasks, alive=lambda: not gone(), metrics=self._metrics)
        place.hold(answers)
        # The engine hears of a hang-up at once, not when this thread next looks: else it would admit what is gone too.
        on_hang_up = request.environ.get(ON_HANG_UP)
        if on_hang_up is not None:
            on_hang_up(answers.abort)
            place.on_leave = lambda: on_hang_up(None)
        if not work.common.stream:
            try:
                return _json(work.body(answers))
            except ClientGone:
                log.info("request %s: the client hung up", label)
                return Response(status=CLIENT_CLOSED)
        response = Response(_stream(answers, work, label), mimetype="text/event-stream")
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        # Not the generator's finally: one that was never started does not run it.
        response.call_on_close(place.keep())
        return response


class Place:
    """A place at the gate and the answers that are worked on there; both are let go of together, once.

    As a context manager it leaves at the end, unless ``keep`` handed that over to somebody else.
    """

    def __init__(self, gate: Gate) -> None:
        gate.enter()
        self._gate: Gate | None = gate
        self._answers: Answers | None = None
        self._kept = False
        self.on_leave: Callable[[], None] | None = None
        self._label = g.label
        self._since = time.monotonic()

    def hold(self, answers: Answers) -> None:
        """Close these when leaving."""
        self._answers = answers

    def keep(self) -> Callable[[], None]:
        """Do not leave at the end of the block; the caller calls what this returns."""
        self._kept = True
        return self._leave

    def _leave(self) -> None:
        gate, self._gate = self._gate, None
        if gate is None:
            return
        if self.on_leave is not None:
            self.on_leave()
        try:
            if (answers := self._answers) is not None:
                answers.close()
                spent = time.monotonic() - self._since
                tokens = answers.prompt_tokens, answers.completion_tokens
                log.info("request %s: %d prompt and %d output tokens in %.3f s", self._label, *tokens, spent)
        finally:
            gate.leave()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None or not self._kept:
            self._leave()


def _stream(answers: Answers, work: Prepared, label: str) -> Iterator[bytes]:
    """The body of a streamed reply. One write per engine event; an error becomes an event, never a silent end."""
    reply, include_usage = work.reply, work.common.include_usage
    reply.begin_stream(include_usage)
    sent = time.monotonic()
    if opening := reply.first(work.choices):
        yield opening
    try:
        for pieces in answers.pieces():
            if chunk := reply.write(pieces):
                sent = time.monotonic()
                yield chunk
            elif time.monotonic() - sent > KEEP_ALIVE_SECONDS:
                sent = time.monotonic()
                yield KEEP_ALIVE
    except ClientGone:
        log.info("request %s: the client hung up", label)
        return
    except RequestRejected as error:
        yield event(errors.body_of(error))
    except Exception:
        log.exception("request %s failed while it was streamed", label)
        yield event(errors.error_body(500, "internal error; the server's log has the details", code="internal_error"))
    else:
        if include_usage:
            yield reply.usage_event(answers)
    yield DONE


def _body() -> dict[str, Any]:
    """The JSON object of this request. RequestRejected 415 for another content type, 400 for what is no object."""
    if request.mimetype != "application/json":
        shown = errors.shorten(request.mimetype) if request.mimetype else "none"
        raise RequestRejected(
            f"the content type must be application/json, not {shown}", code=errors.default_code(415), status=415
        )
    return parse_object(request.get_data(cache=False))


def _json(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status=status, mimetype="application/json")
