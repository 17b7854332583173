"""Operators that are more than a plan: reading values, moving between devices, changing metadata in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from dtorch.client import aliasing, dispatch, factories
from dtorch.client.dispatch import SPECIAL, Info, info_of, run
from dtorch.client.saving import flat_tensor
from dtorch.client.shadow import lose
from dtorch.client.wrap import empty, move, moved_spec, put, rewrap, to_host
from dtorch.core.placements import REPLICATE
from dtorch.core.torch_private import decompose, has_composite_kernel, outside_of_dispatch, set_metadata

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def special(*funcs: Any) -> Callable[[Any], Any]:
    """Register a handler ``(cls, func, args, kwargs) -> result`` for operators."""

    def register(f: Any) -> Any:
        for func in funcs:
            SPECIAL[func] = f
        return f

    return register


# -- values --------------------------------------------------------------------------------------------------------
@special(aten._local_scalar_dense.default, aten.item.default)
def item(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """One number, read from the host copy or from the workers."""
    return to_host(args[0]).item()


@special(aten.is_nonzero.default)
def is_nonzero(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The truth of a tensor of one element."""
    return bool(to_host(args[0]))


@special(aten.equal.default)
def equal(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Shapes are compared here, values where they live; as in torch, dtypes do not matter."""
    a, b = args
    if a.shape != b.shape:
        return False
    return bool((a == b).all().item())


@special(aten.allclose.default)
def allclose(cls: type, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compared where the values live."""
    return bool(aten.isclose.default(*args, **kwargs).all().item())


@special(aten.is_pinned.default)
def is_pinned(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Never: the memory is on other processes."""
    return False


@special(aten.record_stream.default)
def record_stream(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Nothing to do: workers keep the order."""
    return None


@special(
    aten._to_sparse.default, aten._to_sparse.sparse_dim, aten._to_sparse_csr.default, aten._to_sparse_csc.default,
    aten._to_sparse_bsr.default, aten._to_sparse_bsc.default,
)  # fmt: skip
def to_sparse(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Distributed tensors are dense: what is made sparse is a plain tensor of the host."""
    with outside_of_dispatch(), torch.no_grad():
        return func(to_host(args[0]), *args[1:], **kwargs)


# Attribute of a tensor: placements of what is made like it, where they are not its own (ZeRO's optimizer states).
LIKE = "_like"


@special(aten.zeros_like.default, aten.empty_like.default, aten.full_like.default)
def like(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Made where the tensor says."""
    where = args[0].__dict__.get(LIKE)
    if where is None or kwargs.get("device") is not None:
        return run(cls, func, info_of(func), args, kwargs)
    return factories.make_like(func, args[0], args[1:], kwargs, None, where, None)


# -- between devices -----------------------------------------------------------------------------------------------
@special(aten._to_copy.default)
def to_copy(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Cast here, bring to the host, or move to another mesh."""
    x = args[0]
    device = kwargs.get("device")
    rest = {
        k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory", "layout") and v is not None
    }
    if device is None or (device.type == "dtorch" and device.index in (None, x.device.index)):
        return run(cls, func, info_of(func), (x,), rest)
    if device.type == "meta":
        with torch.no_grad():
            return aten._to_copy.default(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), **rest)
    if device.type == "dtorch":
        out = to_mesh(x, device.index)
        return run(cls, func, info_of(func), (out,), rest) if rest else out
    value = to_host(x).to(device)
    return aten._to_copy.default(value, **rest) if rest else value


def to_mesh(x: Any, index: int) -> Any:
    """The tensor on the mesh ``dtorch:index``; placements stay when both meshes have as many axes."""
    aliasing.refresh(x)
    session, spec = x._h.session, x._h.spec
    there = session.layout(session.mesh(index))
    placements = spec.placements if there.ndim == spec.mesh.ndim else (REPLICATE,) * there.ndim
    return move(x, moved_spec(session, spec, there, placements))


@special(aten.copy_.default)
def copy_(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Between host and mesh, between meshes, or an ordinary operator on one mesh."""
    dst, src = args[0], args[1]
    if type(dst) is not cls:
        dst.copy_(to_host(src))
        return dst
    h = dst._h
    if type(src) is not cls:
        value = src.detach()
        if h.family is None and h.view is None and not h.spec.has_partial:
            fresh = put(h.session, value.expand(dst.shape), h.spec.mesh, h.spec.placements, h.spec.dtype)
            _take_over(dst, fresh)
            return dst
        src = put(h.session, value, h.spec.mesh, dtype=h.spec.dtype)
    elif src._h.spec.mesh is not h.spec.mesh:
        if src._h.session is not h.session:
            src = put(h.session, to_host(src), h.spec.mesh)
        else:
            aliasing.refresh(src)
            same = src.shape == dst.shape
            placements = h.spec.placements if same else (REPLICATE,) * h.spec.mesh.ndim
            src = move(src, moved_spec(h.session, src._h.spec, h.spec.mesh, placements))
    return run(cls, func, info_of(func), (dst, src), kwargs)


def _take_over(dst: Any, fresh: Any) -> None:
    """``dst`` becomes the freshly made tensor of the same shape and dtype."""
    h, f = dst._h, fresh._h
    if f.spec is not h.spec:
        # The upload is dense; a destination with another memory order keeps its own.
        run(type(dst), aten.copy_.default, info_of(aten.copy_.default), (dst, fresh), {})
        return
    h.id, f.id = f.id, h.id
    h.shadow = f.shadow


@special(aten.lift_fresh.default, aten.lift.default)
def lift(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Already lifted."""
    return args[0]


@special(aten._pin_memory.default)
def pin_memory(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Pinning a distributed tensor changes nothing."""
    return args[0]


# -- metadata in place ---------------------------------------------------------------------------------------------
def adopt(x: Any, fresh: Any) -> Any:
    """``x`` becomes what ``fresh`` is: id, spec and the wrapper's own sizes and strides."""
    h, f = x._h, fresh._h
    set_metadata(x, fresh)
    h.id, f.id = f.id, h.id
    h.spec, f.spec = f.spec, h.spec
    h.shadow, f.shadow = f.shadow, h.shadow
    h.view = f.view
    if f.family is not None:
        h.family = f.family
    return x


@special(aten.as_strided.default)
def as_strided(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Strides and offset speak of the memory that the tensor lives in: that of its base.

    Raises:
        RuntimeError: the tensor is a view of one that is gone.
    """
    given = {**dict(zip(("self", "size", "stride", "storage_offset"), args, strict=False)), **kwargs}
    x, offset = given["self"], given.get("storage_offset")
    h = x._h
    root = h if h.family is None else h.family.root()
    if root is None:
        raise RuntimeError(
            "as_strided of a view whose base is gone: its memory is not known here. Keep the base, or clone() the view."
        )
    base = x if root is h else rewrap(root)
    if root.spec.dtype != x.dtype:  # sizes and strides are in elements of this one
        base = dispatch.dispatch(cls, aten.view.dtype, (), (base, x.dtype), {})
    start = x.storage_offset() if offset is None else offset
    return run(cls, func, info_of(func), (base, given["size"], given["stride"], start), {})


def _view_in_place(functional: Any) -> Any:
    def handler(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        with torch.inference_mode(x.is_inference()):
            fresh = dispatch.dispatch(cls, functional, (), args, kwargs)
        return adopt(x, fresh)

    return handler


for _inplace, _functional in (
    (aten.t_.default, aten.t.default),
    (aten.transpose_.default, aten.transpose.int),
    (aten.swapaxes_.default, aten.transpose.int),
    (aten.swapdims_.default, aten.transpose.int),
    (aten.squeeze_.default, aten.squeeze.default),
    (aten.squeeze_.dim, aten.squeeze.dim),
    (aten.squeeze_.dims, aten.squeeze.dims),
    (aten.unsqueeze_.default, aten.unsqueeze.default),
    (aten.as_strided_.default, aten.as_strided.default),
):
    SPECIAL[_inplace] = _view_in_place(_functional)


@special(aten.resize_.default)
def resize_(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Another size; elements that fit are kept in memory order, as torch keeps them."""
    x, size = args[0], tuple(args[1])
    if tuple(x.shape) == size:
        return x
    h = x._h
    count = 1
    for n in size:
        count *= n
    fresh = empty(h.session, size, torch.empty(size, device="meta").stride(), h.spec.dtype, h.spec.mesh)
    if count and x.numel():
        flat = x.reshape(-1)
        keep = min(count, x.numel())
        fresh.view(-1)[:keep].copy_(flat[:keep])
    lose(fresh)
    return adopt(x, fresh)


@special(aten.resize_as_.default)
def resize_as_(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The size of another tensor."""
    return args[0].resize_(args[1].shape)


@special(aten.set_.source_Tensor, aten.set_.source_Tensor_storage_offset)
def set_(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Share the source's memory from now on."""
    x, source = args[0], args[1]
    if type(source) is not cls:
        raise RuntimeError("set_ of a distributed tensor needs a distributed source; use copy_ for a plain tensor.")
    if len(args) > 2:
        fresh = source.as_strided(
            args[3], args[4] if len(args) > 4 else torch.empty(args[3], device="meta").stride(), args[2]
        )
    else:
        fresh = dispatch.dispatch(cls, aten.alias.default, (), (source,), {})
    return adopt(x, fresh)


@special(aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)
def set_storage(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """What ``torch.load`` does to give a tensor the bytes that it has read."""
    x, storage = args[0], args[1]
    flat = flat_tensor(storage, x.dtype)
    offset, size = (args[2], args[3]) if len(args) > 3 else (0, flat.shape)
    stride = args[4] if len(args) > 4 else torch.empty(size, device="meta").stride()
    return adopt(x, flat.as_strided(size, stride, offset))


# -- out= variants and composites ----------------------------------------------------------------------------------
def functional_of(func: Any) -> Any:
    """The overload without ``out`` arguments, or ``None``."""
    schema = func._schema
    if not any(a.is_out for a in schema.arguments):
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out and a.name not in _FACTORY]
    namespace, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = candidate._schema.arguments
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        if not writes and [(a.name, str(a.type)) for a in arguments if a.name not in _FACTORY] == wanted:
            return candidate
    return None


_FACTORY = frozenset({"dtype", "layout", "device", "pin_memory"})


def _out_variant(functional: Any) -> Any:
    sums = functional._schema.name.removeprefix("aten::") in ("sum", "nansum", "prod", "mean", "cumsum", "cumprod")

    def handler(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
        names = [a.name for a in func._schema.arguments]
        outs = {n: kwargs[n] for n in names if n in kwargs and _is_out(func, n)}
        plain = args[: len(names) - len(outs)]
        outs.update({n: v for n, v in zip(names, args, strict=False) if _is_out(func, n)})
        for n, t in outs.items():
            for one in t if isinstance(t, (list, tuple)) else (t,):
                if type(one) is not cls:
                    raise RuntimeError(
                        f"{func}: {n} is a plain {one.device} tensor but an input is distributed. Give a distributed "
                        "tensor, or bring the result here with .to_torch()."
                    )
        rest = {k: v for k, v in kwargs.items() if k not in outs}
        if sums and rest.get("dtype") is None:
            rest["dtype"] = next(iter(outs.values())).dtype  # a sum is taken in the type of its target
        results = functional(*plain, **rest)
        flat = list(results) if isinstance(results, (list, tuple)) else [results]
        targets: list[Any] = []
        for t in outs.values():
            targets.extend(t if isinstance(t, (list, tuple)) else (t,))
        for target, result in zip(targets, flat, strict=True):
            if not torch.can_cast(result.dtype, target.dtype):
                raise RuntimeError(
                    f"result type {result.dtype} can't be cast to the desired output type {target.dtype}"
                )
            if target.shape != result.shape:
                if target.numel():
                    warnings.warn(
                        f"An output with one or more elements was resized since it had shape {list(target.shape)}, which "
                        f"does not match the required output shape {list(result.shape)}; resize_(0) it to say so.",
                        stacklevel=4,
                    )
                target.resize_(result.shape)
            target.copy_(result)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return handler


def _is_out(func: Any, name: str) -> bool:
    return any(a.name == name and a.is_out for a in func._schema.arguments)


@special(aten.native_batch_norm.default)
def native_batch_norm(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Its schema does not say that it writes the running statistics; those of its successors do."""
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias, mean, variance, training, momentum, eps = (given[n] for n in names)
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    if training:
        return aten._native_batch_norm_legit.default(x, weight, bias, mean, variance, training, momentum, eps)
    return aten._native_batch_norm_legit_no_training.default(x, weight, bias, mean, variance, momentum, eps)


# Composites that stay whole when autograd does not need their parts: workers have one kernel for them, or one message
# says what several would.
WHOLE = frozenset(
    f"aten::{name}" for name in (
        "linear", "matmul", "scaled_dot_product_attention", "rms_norm", "layer_norm", "lstm", "gru", "rnn_tanh",
        "rnn_relu", "gru_cell",
    )
)  # fmt: skip


# torch multiplies a stack of matrices by one matrix otherwise if that requires a gradient, even where none is recorded:
# a stack that is not contiguous is then copied into one matrix, which rounds differently. Workers must be told.
_of_parameters: dict[Any, Info] = {}


def _run_of_parameters(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    info = _of_parameters.get(func)
    if info is None:
        info = _of_parameters[func] = Info(func, "of_parameters")
    return run(cls, func, info, args, kwargs)


@special(aten.linear.default, aten.matmul.default)
def product(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A matrix product of any dimensions."""
    stack, matrix = (args[0], args[1]) if args[0].dim() >= args[1].dim() else (args[1], args[0])
    if stack.dim() > 2 and not stack.is_contiguous() and matrix.requires_grad:
        return _run_of_parameters(cls, func, args, kwargs)
    return run(cls, func, info_of(func), args, kwargs)


@special(aten.scaled_dot_product_attention.default)
def attention(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Attention, whole unless the program has switched the fused kernel off (``torch.nn.attention.sdpa_kernel``)."""
    if torch.backends.cuda.flash_sdp_enabled():  # not only of CUDA, in spite of its name
        return run(cls, func, info_of(func), args, kwargs)
    return written_out_attention(*args, **kwargs)


def written_out_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention by its parts, as torch's own form of it."""
    return aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


@special(aten._pack_padded_sequence.default)
def pack_padded_sequence(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Rows of all samples by time step, as the lengths say, which torch wants on the host; so are the counts returned."""
    data, lengths, batch_first = args
    numbers = torch.arange(data.shape[0] * data.shape[1]).view(data.shape[:2])
    rows, counts = func((numbers.t() if batch_first else numbers).unsqueeze(2), lengths.cpu(), False)
    return data.reshape(-1, *data.shape[2:])[rows.view(-1).to(data.device)], counts


@special(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def recurrent(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A recurrent network, whole but for dropout between its layers, which draws."""
    _, _, parameters, _, _, dropout, train, _, _ = args
    if dropout and train:
        return decompose(func, args, kwargs)
    if any(p.requires_grad for p in parameters):
        return _run_of_parameters(cls, func, args, kwargs)
    return run(cls, func, info_of(func), args, kwargs)


def _decompose(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return decompose(func, args, kwargs)


def find_special(func: Any) -> Any:
    """The handler of an operator, or ``None`` when a plan is all it needs."""
    found = SPECIAL.get(func)
    if found is not None:
        return found
    functional = functional_of(func)
    if functional is not None:
        return _out_variant(functional)
    if func._schema.name not in WHOLE and has_composite_kernel(func):
        return _decompose
    returns = func._schema.returns
    plain = bool(returns) and not any("Tensor" in str(r.type) for r in returns)
    return _of_metadata if plain and torch.Tag.data_dependent_output not in func.tags else None


def _of_metadata(cls: type, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Operators that return no tensor, ``is_same_size`` for one, and look at sizes and strides alone."""
    return dispatch.other_device(cls, func, args, kwargs, torch.device("meta"))


dispatch.find_special = find_special
