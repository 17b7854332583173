"""Starting what carries out a session: inline in this process, or as child processes."""

from __future__ import annotations

from dtorch.core.config import SessionConfig
from dtorch.protocol.link import Link


def make_link(config: SessionConfig) -> Link:
    """The connection that a configuration asks for."""
    if config.mode == "inline":
        from dtorch.launch.inline import InlineLink  # not above: the template must be up before it imports torch

        return InlineLink(config.device_type)
    from dtorch.launch.session_link import ProcessLink

    return ProcessLink(config)
