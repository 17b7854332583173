"""On a mesh of one device every operator gives torch's bits: over torch's own operator database."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import dtorch
from tests.engine.helpers import equal, full

# Uninitialised values; the rest of the random operators is compared bit for bit as well.
UNDEFINED = re.compile(r"empty|resize_|as_strided\.partial")
# What torch itself does not repeat, or what is no operator on strided tensors.
LEFT_OUT = re.compile(r"sparse|to_sparse|nested|sampled_addmm")
SAMPLES = 2
PARTS = 12


def samples(op: Any) -> Iterator[Any]:
    """A few samples with tensors of at least one dimension."""
    count = 0
    for sample in op.sample_inputs("cpu", torch.float32 if torch.float32 in op.supported_dtypes("cpu") else torch.int64):
        tensors = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
        if any(t.layout != torch.strided for t in tensors) or not any(t.dim() for t in tensors):
            continue
        yield sample
        count += 1
        if count == SAMPLES:
            return


def run(op: Any, sample: Any, move: Any) -> list[Any]:
    torch.manual_seed(0)
    values = tree_map(lambda x: move(x.detach().clone()) if isinstance(x, torch.Tensor) else x, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(1)
    return tree_leaves(op.op(values[0], *values[1], **values[2]))


def differences(op: Any, on: dtorch.DeviceMesh) -> Iterator[str]:
    """What does not agree with torch."""
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
    for i, sample in enumerate(samples(op)):
        try:
            want = run(op, sample, lambda x: x)
        except Exception:  # noqa: S112  (torch refuses its own sample)
            continue
        try:
            got = [full(x) for x in run(op, sample, lambda x: dtorch.Tensor(x, device_mesh=on))]
        except Exception as e:
            yield f"{name} {i}: {type(e).__name__}: {e}"[:300]
            continue
        if len(got) != len(want):
            yield f"{name} {i}: {len(got)} results"
        for g, w in zip(got, want, strict=False):
            if not isinstance(w, torch.Tensor):
                if g != w and g == g:
                    yield f"{name} {i}: {g} for {w}"
                continue
            if (g.shape, g.dtype) != (w.shape, w.dtype):
                yield f"{name} {i}: {g.shape} {g.dtype} for {w.shape} {w.dtype}"
            elif not UNDEFINED.search(name) and not equal(g, w):
                yield f"{name} {i}: other bits"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_operator_database(part):
    on = dtorch.DeviceMesh("cpu", [0])
    wrong = [fault for op in op_db[part::PARTS] if not LEFT_OUT.search(op.name) for fault in differences(op, on)]
    assert not wrong, "\n".join(wrong)
