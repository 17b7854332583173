"""The model registry: which models dtorch knows by name, how a demo of each is made, and how they are run.

Everything here works on plain PyTorch as well; importing the package loads neither torch nor diffusers.
"""

from __future__ import annotations

from .errors import ModelInputError
from .registry import DEMO_TEXT_MODEL, MODELS, DemoEntry, ModelEntry, get_model

__all__ = ["DEMO_TEXT_MODEL", "MODELS", "DemoEntry", "ModelEntry", "ModelInputError", "get_model"]
