"""Cluster mode: a pool of workers on other machines, and its controller.

    client process ── bridge ══ CURVE ══ gate ── a controller a session
                                          ╚═ CURVE ══ agent of a machine ── zygote ── a template a session ── workers

Every session has processes of its own, which speak over socket pairs as they do in local mode; bridge, gate and agents
carry the bytes of these socket pairs between machines (``stream``) and look into none of them. One port is open, the
gate's.
"""
