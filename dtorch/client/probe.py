"""Results whose form only the workers know: asked once for each plan, by running it.

Whether a convolution of a channels-last input gives channels-last results depends on the library, number of threads
and sizes that the worker's torch takes into account; what follows (group norm above all) rounds by the memory format.
The statistics that a norm of half precision saves are of half precision on some devices and not on others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from dtorch.client.session import Session
from dtorch.core.spec import TensorSpec, contiguous_strides, dense_strides
from dtorch.planner.plan import Plan
from dtorch.protocol.values import dtype_from

_STRIDES = frozenset({"aten.convolution", "aten.convolution_backward", "aten._convolution"})
_DTYPES = frozenset({"aten.native_layer_norm", "aten._native_batch_norm_legit_no_training"})


def needs_probe(plan: Plan) -> bool:
    """Whether strides or types of a plan's results must be asked."""
    if plan.dynamic:
        return False
    if plan.call.name in _DTYPES:
        return plan.call.first.dtype.itemsize < 4
    return plan.call.name in _STRIDES and any(
        s.stride != contiguous_strides(s.shape) for s in plan.call.specs if s.ndim > 2
    )


def as_made(session: Session, plan: Plan, ids: list[Any], send: Callable[[Plan], int]) -> Plan:
    """The plan with the strides and types that the workers' results have.

    Args:
        session: where it runs.
        plan: predicted.
        ids: the operands of this call.
        send: encodes and sends a plan, returns its command code.
    """
    asking = dataclasses.replace(plan, dynamic=True)
    code = send(asking)
    number, request = session.request(1)
    with session.lock:
        first = session.take_ids(len(plan.results))
        session.sites.append(session.sites[-1] if session.sites else (as_made.__code__, 0))
        session.buf.extend((code, *ids, first, number))
        session.buf.extend(-(first + i) for i in range(len(plan.results)))
    session.flush()
    session.wait(request, None)
    if request.meta is None:
        return plan  # the operator fails: the user's call will say so
    results = []
    for r, (shape, stride, dtype) in zip(plan.results, request.meta, strict=True):
        assert r.spec is not None, "only predicted plans are probed"
        order = dense_strides(r.spec.shape, tuple(shape), tuple(stride))
        exact = tuple(stride) if tuple(shape) == r.spec.shape else order
        spec = TensorSpec(r.spec.mesh, r.spec.placements, r.spec.shape, exact, dtype_from(dtype))
        results.append(dataclasses.replace(r, spec=spec))
    return dataclasses.replace(plan, results=tuple(results))
