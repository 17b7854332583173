"""Every private name of torch that dtorch uses, in one place; torch is pinned to one minor version for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.optim.optimizer
from torch.jit import _builtins
from torch.utils import _pytree
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._mode_utils import no_dispatch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
disabled_torch_function = torch._C._disabled_torch_function_impl
below_autograd = torch._C._AutoDispatchBelowAutograd
OpOverload = torch._ops.OpOverload
# Python functions of operators that torch's public modules wrap or lack.
nn_functions = torch._C._nn
# The functions that ``with torch.device(...):`` gives a device, and the mode that does it.
device_constructors = _device_constructors
device_context = DeviceContext
# Keywords with which torch's mesh is made without process groups.
MESH_ALONE: dict[str, Any] = {"_init_backend": False, "_rank": 0}
# (module, name) of all that the index of a checkpoint of torch.distributed is made of.
_METADATA = "torch.distributed.checkpoint.metadata"
CHECKPOINT_INDEX = {
    (_METADATA, "Metadata"), (_METADATA, "TensorStorageMetadata"), (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"), (_METADATA, "TensorProperties"), (_METADATA, "MetadataIndex"),
    (_METADATA, "_MEM_FORMAT_ENCODING"), (_METADATA, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"),
    ("torch", "Size"), ("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip


@contextlib.contextmanager
def below_python_dispatch() -> Iterator[None]:
    """Run operators of plain (also meta) tensors without reaching any Python dispatch mode or subclass."""
    with no_dispatch():
        yield


_AUTOCAST: Any = getattr(torch._C.DispatchKey, "AutocastPrivateUse1")  # noqa: B009  (torch's stub lacks it)
_KEYS_AT_IMPORT = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())


def outside_of_dispatch() -> contextlib.AbstractContextManager[None]:
    """Run operators of plain tensors as the main program would, also from within ``__torch_dispatch__``.

    There torch has switched off what lies above Python's part of dispatch: conjugate and negative views would count as
    what they view.
    """
    return torch._C._ForceDispatchKeyGuard(*_KEYS_AT_IMPORT)


def set_metadata(tensor: torch.Tensor, fresh: torch.Tensor) -> None:
    """Give a wrapper the size, strides and offset of another wrapper of the same dtype (after resize, set_, t_)."""
    with no_dispatch():
        before = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            torch.ops.aten.set_.source_Storage_storage_offset(
                tensor, torch.Tensor.untyped_storage(fresh), fresh.storage_offset(), fresh.shape, fresh.stride()
            )
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def register_backend(name: str, module: Any) -> None:
    """Register the PrivateUse1 device under ``name`` with its Python device module; a native guard there already wins."""
    _setup_privateuseone_for_python_backend(name, module)


def overload_name(func: Any) -> str:
    """The name under which ``torch.library`` registers a kernel for an overload."""
    name: str = func._schema.name.split("::")[1]
    return name if func._overloadname == "default" else f"{name}.{func._overloadname}"


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Within an autocast kernel of the device: redispatch below autocast."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        yield


def support_foreach(cls: type) -> None:
    """Let torch.optim use its foreach and fused forms for this tensor class."""
    for module in (sys.modules["torch.optim.optimizer"], sys.modules["torch.utils._foreach_utils"]):
        supported = module._foreach_supported_types
        if cls not in supported:
            supported.append(cls)


def run_backward_on_calling_thread() -> None:
    """Backward of dtorch tensors runs on the thread that asked for it, in every thread.

    torch would use one thread for each device index; operators issued there would lose the user's frame, and handing
    over costs more than it gains, since no computing happens in this process.
    """
    run = torch.autograd.graph._engine_run_backward

    def on_this_thread(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return run(*args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = on_this_thread  # type: ignore[attr-defined]


def in_function_transform() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is active."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return bool(torch.autograd.forward_ad._current_level >= 0)


def has_composite_kernel(func: Any) -> bool:
    """Whether torch has the operator in C++ only written in terms of others (CompositeImplicitAutograd).

    Python decompositions do not count, nor do operators with a kernel besides (``silu_backward``): torch runs those
    kernels, with other rounding.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), "CPU")


def decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run such an operator by its parts."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def load_location(saved: str) -> torch.device | None:
    """Where the ``torch.load`` in progress puts a tensor saved from a device type; ``None`` where it was."""
    location = torch.serialization._serialization_tls.map_location
    if isinstance(location, dict):
        location = location.get(saved)
    return torch.device(location) if isinstance(location, (str, torch.device)) else None


def script_as(new: Any, old: Any) -> None:
    """Let ``torch.jit.script`` compile calls of ``new`` as those of torch's own function ``old``."""
    operator = _builtins._find_builtin(old)
    if operator is not None:
        _builtins._register_builtin(new, operator)


def trees() -> Any:
    """torch's functions on nested containers (``tree_flatten``, ``tree_unflatten``); libraries register theirs there."""
    return _pytree


def compile_function(function: Callable[..., Any], examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A function of tensors, without effects on them, compiled by inductor for tensors formed like the examples.

    Raises:
        Exception: of many kinds, it cannot be compiled: there is no compiler, or no kernel of a form.
    """
    from torch._inductor import compile as compile_graph
    from torch._inductor import config
    from torch.fx.experimental.proxy_tensor import make_fx

    # With one thread inductor keeps no processes of its own.
    with torch.inference_mode(False), torch.no_grad(), config.patch(compile_threads=1):
        graph = make_fx(function, tracing_mode="fake")(*examples)
        return compile_graph(graph, list(examples))  # type: ignore[no-any-return]


def modes_are_active() -> bool:
    """Whether a dispatch mode wants to see every operator."""
    return torch._C._len_torch_dispatch_stack() > 0


def function_modes() -> int:
    """Number of active torch function modes, such as ``with torch.device(...):``."""
    return torch._C._len_torch_function_stack()
