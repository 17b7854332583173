"""As the engine's tests: each test says in which modes; sessions have as many processes and threads on every machine."""

from __future__ import annotations

from tests.engine.conftest import mode, one_thread

__all__ = ["mode", "one_thread"]
