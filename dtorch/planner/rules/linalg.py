"""Linear algebra on stacks of matrices: the stack may be cut, matrices may not; nor may vectors within distances."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.planner.call import Call
from dtorch.planner.rule import Label, Labels, NoRule, Rule, replicated, rule
from dtorch.planner.rules.pointwise import broadcast_labels

_WHOLE_MATRIX: Labels = (None, None)


def _stack(shape: Sequence[int], stack: Sequence[int], core: Labels) -> Labels:
    """Labels of a tensor that is a stack of ``core``; its leading dimensions broadcast to ``stack``."""
    return broadcast_labels(shape[: len(shape) - len(core)], stack) + core


def _empty(outs: Sequence[torch.Tensor]) -> frozenset[int]:
    """Results that were not asked for: torch makes them of no elements and no stack."""
    return frozenset(i for i, o in enumerate(outs) if tuple(o.shape) == (0,))


@rule(
    "aten.linalg_inv_ex", "aten._linalg_det", "aten._linalg_slogdet", "aten._linalg_eigh", "aten.linalg_eig",
    "aten._linalg_eigvals", "aten._linalg_svd", "aten.linalg_qr", "aten.geqrf", "aten.linalg_cholesky_ex",
    "aten.cholesky", "aten.cholesky_inverse", "aten.linalg_lu", "aten.linalg_lu_factor_ex", "aten.linalg_ldl_factor_ex",
    "aten.linalg_matrix_exp", "aten.linalg_householder_product", "aten.lu_unpack",
)  # fmt: skip
def factor(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Each matrix by itself. Whatever comes with it or out of it is a stack of the same shape."""
    depth = call.first.ndim - 2
    if depth < 0 or any(s.shape[:depth] != call.first.shape[:depth] for s in call.specs):
        raise NoRule(f"{call.name} with stacks that differ")
    labels = tuple(range(depth))
    skipped = _empty(outs) if depth else frozenset()
    inputs = [labels + (None,) * (s.ndim - depth) for s in call.specs]
    outputs = [(None,) if i in skipped else labels + (None,) * (o.ndim - depth) for i, o in enumerate(outs)]
    return Rule(inputs, outputs, whole=skipped)


def _columns(left: bool) -> Labels:
    """Columns of a right-hand side are solved for one by one; its rows, when the unknown stands on the left."""
    return (None, "column") if left else ("column", None)


@rule("aten.linalg_solve_triangular", "aten.cholesky_solve", "aten._cholesky_solve_helper", "aten.linalg_lu_solve",
      "aten.linalg_ldl_solve", "aten.triangular_solve")  # fmt: skip
def solve(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Factors and right-hand sides in stacks that broadcast."""
    right = {"aten.linalg_solve_triangular": "B", "aten.linalg_lu_solve": "B", "aten.linalg_ldl_solve": "B"}
    side = call.slots[right.get(call.name, "self")]
    columns = _columns(bool(call.get("left", True)))
    stack = outs[0].shape[:-2]
    cores: list[Labels] = [(None,) if i == call.slots.get("pivots") else _WHOLE_MATRIX for i in range(len(call.specs))]
    cores[side] = columns
    inputs = [_stack(s.shape, stack, core) for s, core in zip(call.specs, cores, strict=True)]
    outputs = [_stack(stack, stack, ()) + columns]
    if len(outs) > 1:  # triangular_solve also returns its coefficients, spread over the stack
        outputs.append(_stack(stack, stack, ()) + _WHOLE_MATRIX)
    return Rule(inputs, outputs, whole=frozenset({1}))


@rule("aten._linalg_solve_ex")
def solve_ex(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Solution and factors; a right-hand side of one dimension less than the matrices is a stack of vectors."""
    a, b = call.spec("A"), call.spec("B")
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    core: Labels = (None,) if vector else _columns(bool(call["left"]))
    stack = outs[0].shape[: outs[0].ndim - len(core)]
    matrices = _stack(a.shape, stack, _WHOLE_MATRIX)
    factors = [matrices[:-2] + (None,) * n for n in (2, 1, 0)]  # LU, pivots, info
    # They do not depend on the right-hand side: where only that is cut, they come out the same everywhere.
    return Rule(
        [matrices, _stack(b.shape, stack, core)], [_stack(stack, stack, ()) + core, *factors],
        whole=frozenset({1, 2, 3}),
    )  # fmt: skip


@rule("aten.ormqr")
def ormqr(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Product with an orthogonal matrix given by reflectors, column by column (row by row from the right)."""
    stack = outs[0].shape[:-2]
    core = _columns(bool(call["left"]))
    q, tau, other = call.specs
    columns = _stack(other.shape, stack, core)
    return Rule([_stack(q.shape, stack, _WHOLE_MATRIX), _stack(tau.shape, stack, (None,)), columns], [columns])


@rule("aten.linalg_pinv.atol_rtol_tensor")
def pinv(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Pseudo-inverse; tolerances broadcast to the stack."""
    stack = call.first.shape[:-2]
    matrices = _stack(call.first.shape, stack, _WHOLE_MATRIX)
    if any(torch.broadcast_shapes(s.shape, stack) != torch.Size(stack) for s in call.specs[1:]):
        return replicated(call, outs)
    return Rule([matrices, *(broadcast_labels(s.shape, stack) for s in call.specs[1:])], [matrices])


@rule("aten._linalg_check_errors")
def check_errors(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Each device looks at the error codes of its own matrices."""
    return Rule([tuple(range(call.first.ndim))], [])


@rule("aten.linalg_lstsq", "aten.dist")
def whole(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Results depend on everything, or only the workers know their shapes."""
    return replicated(call, outs)


@rule("aten.linalg_cross")
def cross(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Three components along ``dim``; the rest broadcasts."""
    shape = outs[0].shape
    along = ("d", call["dim"] % outs[0].ndim)

    def labels(own: Sequence[int]) -> Labels:
        return tuple(None if x == along else x for x in broadcast_labels(own, shape))

    return Rule([labels(s.shape) for s in call.specs], [labels(shape)])


# -- products that matmul.py lacks ---------------------------------------------------------------------------------
@rule("aten.addbmm")
def addbmm(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """beta * input + alpha * the sum of all products; on a cut sum only the first device adds the input."""
    bias = tuple(x and ("m", "n")[x[1]] for x in broadcast_labels(call.first.shape, outs[0].shape))
    summed: dict[Label, str] = {"b": "sum", "k": "sum"}
    return Rule(
        [bias, ("b", "m", "k"), ("b", "k", "n")], [("m", "n")], reduce=summed, kernels=dict.fromkeys(summed, "add_once")
    )


@rule("aten._addmm_activation")
def addmm_activation(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """addmm followed by an activation, which needs the finished sum."""
    bias = tuple(x and ("m", "n")[x[1]] for x in broadcast_labels(call.first.shape, outs[0].shape))
    return Rule([bias, ("m", None), (None, "n")], [("m", "n")])


@rule("aten._int_mm")
def int_mm(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """(m, k) @ (k, n) of bytes, summed as 32-bit integers."""
    return Rule([("m", "k"), ("k", "n")], [("m", "n")], reduce={"k": "sum"})


@rule("aten._grouped_mm")
def grouped_mm(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """One product for each group; ``offs`` says where groups end in the dimension that lacks one of its own."""
    a, b = call.spec("self"), call.spec("mat2")
    if "bias" in call.slots:
        return replicated(call, outs)
    left: Labels = ("g", "m", "k") if a.ndim == 3 else ("m", "k")
    right: Labels = ("g", "k", "n") if b.ndim == 3 else ("k", "n")
    # What offsets count may not be cut, nor may the groups then.
    counted = {(3, 3): (), (2, 3): ("m", "g"), (3, 2): ("n", "g"), (2, 2): ("k", "g")}[a.ndim, b.ndim]

    def uncut(labels: Labels) -> Labels:
        return tuple(None if x in counted else x for x in labels)

    out = uncut(("m", "n") if a.ndim + b.ndim == 5 else ("g", "m", "n"))
    # The kernels read 16 bytes at a time: pieces of rows are a multiple of that.
    sizes = {"m": a.shape[-2], "k": a.shape[-1], "n": b.shape[-1]}
    units = {x: n * a.dtype.itemsize // 16 for x, n in sizes.items() if x != "m" or a.ndim == b.ndim == 2}
    offs = [(None,)] if "offs" in call.slots else []
    return Rule([uncut(left), uncut(right), *offs], [out], reduce={"k": "sum"}, units=units)


# -- distances -----------------------------------------------------------------------------------------------------
@rule("aten._cdist_forward", "aten._euclidean_dist")
def cdist(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Every vector of the first list against every one of the second."""
    a, b = call.specs
    stack = outs[0].shape[:-2]
    inputs = [_stack(a.shape, stack, ("p", None)), _stack(b.shape, stack, ("r", None))]
    return Rule(inputs, [(*_stack(stack, stack, ()), "p", "r")])


@rule("aten._cdist_backward")
def cdist_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Gradient of the first list: a sum over the second."""
    stack = outs[0].shape[:-2]
    cores: dict[str, Labels] = {"grad": ("p", "r"), "x1": ("p", "m"), "x2": ("r", "m"), "cdist": ("p", "r")}
    inputs = [_stack(call.spec(name).shape, stack, core) for name, core in cores.items()]
    return Rule(inputs, [(*_stack(stack, stack, ()), "p", "m")], reduce={"r": "sum"})
