"""Starting what carries out a session: inline in this process, or as child processes."""

from __future__ import annotations

from dtorch.core.config import SessionConfig
from dtorch.launch.inline import InlineLink
from dtorch.protocol.link import Link


def make_link(config: SessionConfig) -> Link:
    """The connection that a configuration asks for."""
    if config.mode == "inline":
        return InlineLink(config.device_type)
    from dtorch.launch.session_link import ProcessLink

    return ProcessLink(config)
