"""Operators of a record that do not communicate, compiled into one function by ``torch.compile``'s inductor.

Compiling takes seconds and happens beside the work: until it is done, the operators run one by one. What cannot be
compiled goes on like that. Results may differ from those of the operators in the last bits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.core.torch_private import compile_function

_log = logging.getLogger("dtorch")
_one_at_a_time = threading.Lock()
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


class Fused:
    """A function of tensors to a tuple of tensors, which writes none; the same one, faster, some calls later.

    Attributes:
        compiled: whether calls run compiled code by now; ``None`` as long as it is not known whether they ever will.
    """

    def __init__(self, function: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        self._function = self._call = function
        self._results: list[Form] | None = None
        self.compiled: bool | None = None

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._results is not None:
            return self._call(*inputs)
        results = self._function(*inputs)
        self._results = _forms(results)
        threading.Thread(target=self._compile, args=(_forms(inputs),), name="dtorch-compile", daemon=True).start()
        return results

    def _compile(self, forms: list[Form]) -> None:
        """On a thread of its own; a daemon, for a worker that ends does not wait for it."""
        try:
            with _one_at_a_time:
                examples = [torch.empty_strided(size, stride, dtype=d, device=at) for size, stride, d, at in forms]
                function = compile_function(self._function, examples)
        except Exception as e:  # whatever it is, there is another way
            self.compiled = False
            _log.warning("A captured part runs operator by operator; it cannot be compiled: %s", str(e).strip()[:300])
            return

        def first(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = tuple(function(*inputs))
            self.compiled = _forms(results) == self._results
            self._call = function if self.compiled else self._function
            return results if self.compiled else self._function(*inputs)

        self._call = first


def _forms(tensors: Sequence[Any]) -> list[Form]:
    return [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors]
