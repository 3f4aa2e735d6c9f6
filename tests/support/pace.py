"""What a test does to an engine's steps: slow them down, hold them, look at their plans, make one fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from device.contract import HostBuffer
from runtime.engine import Engine
from runtime.scheduler import Plan


class Pace:
    """Called with each plan on the engine thread before the step is launched.

    delay: seconds that every step takes longer. look: is shown every plan. It is given to ``scripted_engine`` as
    ``on_step``, or attached to an engine with any model.
    """

    def __init__(self, delay: float = 0.0, look: Callable[[Plan], None] | None = None) -> None:
        self.delay = delay
        self.look = look
        self._go = threading.Event()
        self._go.set()

    def __call__(self, plan: Plan) -> None:
        if self.look is not None:
            self.look(plan)
        if self.delay:
            time.sleep(self.delay)
        assert self._go.wait(30), "held for too long"

    def hold(self) -> None:
        """The next step waits until ``release``."""
        self._go.clear()

    def release(self) -> None:
        """Steps go on."""
        self._go.set()

    def attach(self, engine: Engine) -> Pace:
        """Slip in where the engine asks its model for its part of a step's inputs."""
        model: Any = engine.model
        fill = model.fill

        def paced(plan: Plan, buffer: HostBuffer) -> None:
            self(plan)
            fill(plan, buffer)

        model.fill = paced
        return self
