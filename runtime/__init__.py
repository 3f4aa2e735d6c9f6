"""The runtime: engine, scheduler, paged KV, models and loaders.

``from runtime import Engine`` is the Python interface: ``Engine.load("smollm2-135m").generate(["Hello"])``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.api import GenerationRequest, SamplingParams
    from runtime.engine import Engine

__all__ = ["Engine", "GenerationRequest", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Lazy, so that importing one module of the runtime does not import all of it.
    if name == "Engine":
        from runtime.engine import Engine

        return Engine
    if name in ("GenerationRequest", "SamplingParams"):
        from runtime import api

        return getattr(api, name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
