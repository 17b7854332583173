"""Starting what carries out a session: inline in this process, or as child processes."""

from __future__ import annotations

from dtorch.core.config import SessionConfig
from dtorch.core.errors import DtorchError
from dtorch.protocol.link import Link


def make_link(config: SessionConfig) -> Link:
    """The connection that a configuration asks for.

    Raises:
        DtorchError: this machine has no devices of the type that workers are to use.
    """
    if config.mode != "cluster":
        _check_device_type(config.device_type)
    if config.mode == "inline" and config.null_workers:
        from dtorch.launch.dry import DryLink

        return DryLink()
    if config.mode == "inline":
        from dtorch.launch.inline import InlineLink  # not above: the template must be up before it imports torch

        return InlineLink(config.device_type, config.file_roots)
    from dtorch.launch.session_link import ProcessLink

    return ProcessLink(config)


def _check_device_type(name: str) -> None:
    if name == "cpu":
        return
    import torch  # as above

    try:
        there = bool(torch.get_device_module(torch.device(name)).is_available())
    except (RuntimeError, AttributeError):
        there = False
    if not there:
        raise DtorchError(f"device_type={name!r}: torch {torch.__version__} finds no such device on this machine.")
