"""These tests need torch and transformers: they are collected only where JUMAR_TEST_REFERENCE=1 says so."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("JUMAR_TEST_REFERENCE") == "1" else ["test_*.py"]
