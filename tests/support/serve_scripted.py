"""A service in a process of its own, with the scripted model, run as ``jumar serve`` runs it.

Usage: python -m tests.support.serve_scripted '{"step": 0.01, "server": {...}, "engine": {...}, "fault": "hang"}'
Prints its URL. ``step``: seconds a step takes. ``fault``: "raise" or "hang" in the step of a prompt of 13 tokens.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from runtime.scheduler import Plan
from server.config import ServerConfig
from server.service import Service, open_port, signals
from tests.support.engines import scripted_engine
from tests.support.service import script_or

FAULTY_PROMPT = [5] * 13


def main(options: dict[str, Any]) -> int:
    def on_step(plan: Plan) -> None:
        time.sleep(options.get("step", 0.0))
        if any(seq.prompt_len == len(FAULTY_PROMPT) for seq in plan.seqs):
            if options.get("fault") == "raise":
                raise RuntimeError("a planted fault")
            if options.get("fault") == "hang":
                time.sleep(3600)

    logging.basicConfig(level="INFO")
    config = ServerConfig(host="127.0.0.1", port=0, **options.get("server", {}))
    sock = open_port(config)
    engine = scripted_engine(script_or("x" * 1000), on_step=on_step, max_len=2048, **options.get("engine", {}))
    service = Service(engine, config, sock, allow_extra=True)
    with signals(service.request_stop):
        service.start()
        print(service.url, flush=True)
        return service.run()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
