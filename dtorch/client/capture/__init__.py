"""Capture and replay: what a call sends to the workers is recorded, and later calls of the kind are one command.

``captured`` decides for each call, ``key`` tells kinds of calls apart, ``state`` sees what the function reads beside its
arguments, ``recorder`` notes the stream, ``recording`` makes sense of it, ``variant`` runs it again.
"""

from __future__ import annotations

from dtorch.client.capture.captured import Captured, CaptureWarning, capture

__all__ = ["CaptureWarning", "Captured", "capture"]
