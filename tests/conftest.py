"""Settings of the whole suite."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# Plain: the same examples every time, so that a red run means the change and not the dice. JUMAR_TEST_LONG=1
# (scripts/test.sh --long) draws new and more ones; print_blob says how to run a failing one again.
settings.register_profile("plain", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("long" if os.environ.get("JUMAR_TEST_LONG") == "1" else "plain")

# Started in the background of a script, a process ignores Ctrl-C, and all that it starts do: the tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A user's own settings are not the tests'.
for _name in [name for name in os.environ if name.startswith("JUMAR_") and not name.startswith("JUMAR_TEST_")]:
    if _name not in ("JUMAR_PYTHON", "JUMAR_SMOLLM2_GGUF", "JUMAR_SCHEDULE_CASES"):
        del os.environ[_name]


def pytest_collection_finish() -> None:
    """JUMAR_* variables are settings of the product, and it refuses one that it does not know."""
    for name in [name for name in os.environ if name.startswith("JUMAR_TEST_")]:
        del os.environ[name]
