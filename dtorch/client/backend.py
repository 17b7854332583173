"""The ``dtorch`` device: registration with torch, its device module, and the kernels that need no distributed input."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch

from dtorch import native
from dtorch.client import factories, graph, products, random
from dtorch.client.dispatch import dispatch
from dtorch.client.saving import rebuild, restore
from dtorch.client.session import MAX_MESHES
from dtorch.client.specials import copy_, item, written_out_attention
from dtorch.client.tensor import DTensor
from dtorch.core import mesh as mesh_module
from dtorch.core import torch_private
from dtorch.core.mesh import DeviceMesh, current_mesh, select_mesh
from dtorch.planner.missing_meta import has_fused_attention

_library: list[torch.library.Library] = []


class _OneDevice(contextlib.AbstractContextManager["_OneDevice"]):
    """``with torch.dtorch.device(k):`` mesh k is the default."""

    def __init__(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        self._mesh = None if index is None or index < 0 else graph.current_session().mesh(index)

    def __enter__(self) -> _OneDevice:
        if self._mesh is not None:
            self._mesh.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._mesh is not None:
            self._mesh.__exit__(*exc)


class _Order:
    """``torch.Stream`` of the device: work is done in the order in which it was issued, all of it in the same one."""

    def synchronize(self) -> None:
        """Wait for everything issued so far; raises what failed."""
        for session in graph.sessions():
            session.synchronize()

    def wait_stream(self, stream: Any) -> None:
        """There is no other stream."""


_ORDER = _Order()


class DeviceModule:
    """``torch.dtorch``: what torch and its users ask of a device type."""

    device = _OneDevice
    _initialized = True  # torch.utils.checkpoint looks at it before it saves the generators' states

    def is_available(self) -> bool:
        """Always: workers are started on first use."""
        return True

    def is_initialized(self) -> bool:
        """Always."""
        return True

    def init(self) -> None:
        """Nothing to do ahead of the first use."""

    _lazy_init = init

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Number of meshes in use, at least the default one."""
        return max(1, graph.current_session().mesh_count)

    def current_device(self) -> int:
        """Index of the default mesh."""
        mesh = current_mesh()
        return 0 if mesh is None else graph.current_session().layout(mesh).id

    def set_device(self, device: Any) -> None:
        """Mesh ``index`` becomes the default, until the innermost ``with mesh:`` ends."""
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if index != self.current_device():
            select_mesh(graph.current_session().mesh(index))

    def get_device_name(self, device: Any = None) -> str:
        """A readable name."""
        return "dtorch mesh"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Dtypes of autocast."""
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """CPU and current CUDA devices compute in bfloat16."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seed the default generator."""
        self.manual_seed_all(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the default generator of every session."""
        for session in graph.sessions():
            random.streams(session).default.reseed(int(seed))

    def initial_seed(self) -> int:
        """The default generator's last seed."""
        return random.streams(graph.current_session()).default.initial_seed

    def get_rng_state(self, device: Any = "dtorch") -> torch.Tensor:
        """State of the default generator as a CPU uint8 tensor; waits for the workers."""
        return random.get_state(random.streams(graph.current_session()).default)

    def set_rng_state(self, state: torch.Tensor, device: Any = "dtorch") -> None:
        """Continue from a state."""
        random.set_state(random.streams(graph.current_session()).default, state)

    def synchronize(self, device: Any = None) -> None:
        """Wait for everything issued so far; raises what failed."""
        graph.current_session().synchronize()

    def current_stream(self, device: Any = None) -> _Order:
        """The only one."""
        return _ORDER

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """Nothing changes within."""
        return contextlib.nullcontext()

    def empty_cache(self) -> None:
        """Workers release what is freed at once on CPU."""

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes held by this process for the device: none."""
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Nothing is counted in this process."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes of the machine's memory, as the workers on it see it."""
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _enter_device(mesh: DeviceMesh) -> Any:
    """Make a mesh torch's current device, which ``.to("dtorch")`` without an index asks for."""
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(graph.session_of(mesh).layout(mesh).id)
    return before


def register() -> None:
    """Make ``dtorch`` a device of torch. Called once, when the package is used first."""
    if _library:
        return
    module = native.load()
    if module is not None:
        module.setup(MAX_MESHES)
        mesh_module.enter_device, mesh_module.leave_device = _enter_device, torch.accelerator.set_device_index
    torch_private.register_backend("dtorch", DeviceModule())
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    for func in factories.KERNELS:
        library.impl(torch_private.overload_name(func), factories.kernel(func), "PrivateUse1")
    # Zeros without memory, as some gradients have; here they are zeros like any other.
    library.impl("_efficientzerotensor", factories.kernel(torch.ops.aten.zeros.default), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", _local_scalar_dense, "PrivateUse1")
    for name in ("native_channel_shuffle", "mish_backward", "silu_backward"):
        # Never called (the Python key comes first); with a kernel present torch keeps these whole for autograd, as it
        # does on CPU and CUDA, instead of decomposing them with other rounding.
        library.impl(name, _unreachable, "PrivateUse1")
    library.impl("tensor_split.tensor_indices_or_sections", _tensor_split, "AutogradPrivateUse1")
    library.impl("tensor_split.tensor_indices_or_sections", _tensor_split, "PrivateUse1")
    _attention(library)
    _keep_whole(library)
    _values_only(library)
    _autocast(library)
    setattr(torch, "Generator", random.Generator)  # noqa: B010  (a class, to type checkers)
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch_private.support_foreach(DTensor)
    torch_private.run_backward_on_calling_thread()
    torch.serialization.add_safe_globals([rebuild])
    torch.serialization.register_package(1, lambda storage: None, restore)  # type: ignore[arg-type]


def _unreachable(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("dtorch's Python dispatch comes before this kernel")


def _copy_from(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copies that torch makes below Python dispatch (``torch.tensor(data, device="dtorch")``)."""
    result: torch.Tensor = copy_(DTensor, torch.ops.aten.copy_.default, (destination, source), {})
    return result


def _local_scalar_dense(x: torch.Tensor) -> Any:
    """Numbers that torch reads below Python dispatch (``torch.tensor([x])`` with a distributed ``x``)."""
    return item(DTensor, torch.ops.aten._local_scalar_dense.default, (x,), {})


def _tensor_split(x: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> Any:
    """Where to split is read here; torch would insist on a plain CPU tensor."""
    return x.tensor_split(indices.tolist(), dim)


def _attention(library: torch.library.Library) -> None:
    """Keep scaled_dot_product_attention whole: without a gradient as one operator, with one as the fused kernel that
    has its own derivative; only dropout takes torch's written-out form."""
    aten = torch.ops.aten
    whole = aten.scaled_dot_product_attention.default

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if not _needs_gradient(query, key, value, attn_mask):
            return dispatch(
                DTensor, whole, (), (query, key, value, attn_mask, dropout_p, is_causal),
                {"scale": scale, "enable_gqa": enable_gqa},
            )  # fmt: skip
        shapes = (query.shape, key.shape, value.shape, None if attn_mask is None else attn_mask.shape)
        fused = torch.backends.cuda.flash_sdp_enabled() and has_fused_attention(*shapes, enable_gqa)
        if dropout_p or not fused or (attn_mask is not None and attn_mask.requires_grad):
            return written_out_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                attn_mask.logical_not(), float("-inf")
            )
        return aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]

    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")


def _needs_gradient(*values: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def _keep_whole(library: torch.library.Library) -> None:
    """linear, matmul, layer_norm and recurrent networks as one operator where autograd does not need their parts.

    Recurrent networks have other kernels on the CPU than on devices like this one.
    """
    aten = torch.ops.aten
    for whole, with_gradient in {
        aten.linear.default: lambda x, weight, bias=None: products.linear(x, weight, bias),
        aten.matmul.default: products.matmul,
        aten.layer_norm.default: None,
        aten.lstm.input: None,
        aten.gru.input: None,
        aten.rnn_tanh.input: None,
        aten.rnn_relu.input: None,
        aten.gru_cell.default: None,
    }.items():
        library.impl(torch_private.overload_name(whole), _whole(whole, with_gradient), "AutogradPrivateUse1")


def _values_only(library: torch.library.Library) -> None:
    """Singular and eigenvalues alone come from other routines than those with vectors; for a subclass of Tensor torch
    would always take the latter."""
    aten = torch.ops.aten

    def eigvalsh(x: torch.Tensor, UPLO: str = "L") -> Any:
        return aten._linalg_eigh.default(x, UPLO, _needs_gradient(x))[0]

    def svdvals(x: torch.Tensor, *, driver: str | None = None) -> Any:
        return aten._linalg_svd.default(x, False, _needs_gradient(x), driver=driver)[1]

    library.impl("linalg_eigvalsh", eigvalsh, "AutogradPrivateUse1")
    library.impl("linalg_svdvals", svdvals, "AutogradPrivateUse1")


def _whole(func: Any, with_gradient: Callable[..., Any] | None = None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _needs_gradient(*(t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)))):
            return dispatch(DTensor, func, (), args, kwargs)
        result = NotImplemented if with_gradient is None else with_gradient(*args)
        return func.decompose(*args, **kwargs) if result is NotImplemented else result

    return call


# Autocast policy: the CPU's lists of torch 2.13 (aten/src/ATen/autocast_mode.h), so that results match torch's there.
_AUTOCAST_LOW = [
    "conv1d", "conv2d", "conv3d", "bmm", "mm", "linalg_vecdot", "baddbmm", "addmm", "addbmm", "linear",
    "_convolution.deprecated", "matmul", "conv_tbc", "scaled_dot_product_attention", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "prelu",
]
_AUTOCAST_FLOAT32 = [
    "mse_loss", "nll_loss", "nll_loss_nd", "cross_entropy_loss", "binary_cross_entropy", "grid_sampler", "polar",
    "cumprod", "prod", "quantile", "nanquantile", "stft", "cdist", "trace", "cholesky", "pinverse", "linalg_svd",
    "smooth_l1_loss", "huber_loss", "kl_div", "hinge_embedding_loss", "cosine_embedding_loss", "ctc_loss.IntList",
]


def _autocast(library: torch.library.Library) -> None:
    fallback = torch.library.Library("_", "IMPL")
    _library.append(fallback)
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _AUTOCAST_LOW:
        library.impl(name, _casting(name, None), "AutocastPrivateUse1")
    for name in _AUTOCAST_FLOAT32:
        library.impl(name, _casting(name, torch.float32), "AutocastPrivateUse1")


def _casting(name: str, dtype: torch.dtype | None) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(torch.ops.aten, packet)
    op = getattr(op, overload or op.overloads()[0])

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            eligible = value.is_floating_point() and value.dtype != torch.float64 and isinstance(value, DTensor)
            return value.to(dtype or torch.get_autocast_dtype("dtorch")) if eligible else value
        if isinstance(value, (list, tuple)):
            return type(value)(cast(v) for v in value)
        return value

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch_private.without_autocast():
            return op(*[cast(a) for a in args], **{k: cast(v) for k, v in kwargs.items()})

    return call
