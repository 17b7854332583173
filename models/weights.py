"""Weights of loaded models."""

from __future__ import annotations

import itertools

import torch


def copy_out_of_files(module: torch.nn.Module) -> None:
    """Give every weight memory of its own instead of the mapped file's.

    A CPU kernel may round differently for data that is not aligned to 16 bytes, as data in a file often is not. For
    results equal to the bit, the weights must be aligned on both sides; those on a mesh are.
    """
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        tensor.data = tensor.data.clone()
