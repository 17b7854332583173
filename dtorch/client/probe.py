"""Results whose strides only the workers know: asked once for each plan, by running it.

Whether a convolution of a channels-last input gives channels-last results depends on the library, number of threads
and sizes that the worker's torch takes into account; what follows (group norm above all) rounds by the memory format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from dtorch.client.session import Session
from dtorch.core.spec import contiguous_strides, dense_strides
from dtorch.planner.plan import Plan

_PROBED = frozenset({"aten.convolution", "aten.convolution_backward", "aten._convolution"})


def needs_probe(plan: Plan) -> bool:
    """Whether a plan's result strides must be asked."""
    return (
        plan.call.name in _PROBED
        and not plan.dynamic
        and any(s.stride != contiguous_strides(s.shape) for s in plan.call.specs if s.ndim > 2)
    )


def with_strides(session: Session, plan: Plan, ids: list[Any], send: Callable[[Plan], int]) -> Plan:
    """The plan with the strides that the workers' results have.

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
        session.sites.append(session.sites[-1] if session.sites else (with_strides.__code__, 0))
        session.buf.extend((code, *ids, first, number))
        session.buf.extend(-(first + i) for i in range(len(plan.results)))
    session.flush()
    session.wait(request, None)
    if request.meta is None:
        return plan  # the operator fails: the user's call will say so
    results = []
    for r, (shape, stride, _) in zip(plan.results, request.meta, strict=True):
        assert r.spec is not None, "only predicted plans are probed"
        order = dense_strides(r.spec.shape, tuple(shape), tuple(stride))
        exact = tuple(stride) if tuple(shape) == r.spec.shape else order
        results.append(dataclasses.replace(r, spec=r.spec.replace(stride=exact)))
    return dataclasses.replace(plan, results=tuple(results))
