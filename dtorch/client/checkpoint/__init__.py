"""Checkpoints: ``save`` and ``load`` of whole states, whatever lies on meshes."""

from dtorch.client.checkpoint.load import load
from dtorch.client.checkpoint.pending import PendingSave
from dtorch.client.checkpoint.random_state import RandomState
from dtorch.client.checkpoint.save import save

__all__ = ["PendingSave", "RandomState", "load", "save"]
