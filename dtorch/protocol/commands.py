"""The command stream of a session: one flat list of plain values a batch.

A batch payload is a msgpack list of commands laid out flat, followed by raw buffers as further frames. A command is its code and then its operands, so that running a cached operator costs the client one
``list.extend``:

    code >= FIRST_PLAN   run plan (code - FIRST_PLAN): input ids, scalars, then the id of the first new result
    negative                               forget tensor -code
    MESH      id, shape, devices, workers  the mesh's devices and the worker of each
    SPEC      id, data                     a tensor spec (protocol.values.encode_spec)
    PLAN      id, data                     a plan (protocol.plans.encode_plan)
    PUT       id, spec, frame              a tensor from the buffer in that frame: every device keeps its part
    FETCH     request, id, spec, positions the values held at these positions of the mesh; other workers of it confirm
    SEED      generator, seed              (re)start a generator
    STATE     generator, id, spec          the generator's state as a replicated uint8 tensor
    RESTORE   generator, id                set the generator to that state
    SYNC      request                      confirm that everything before is done
    COUNT     serial                       number of the next operator, for a worker that joins later
"""

from __future__ import annotations

MESH, SPEC, PLAN, PUT, FETCH, SEED, STATE, RESTORE, SYNC, COUNT = range(10)
FIRST_PLAN = 32

# Replies from a worker: a msgpack list [kind, ...] and raw buffers as further frames.
#   VALUE   request, worker, positions, error or None   buffers: one a position
#   META    request, [[shape, stride, dtype], ...]      what a dynamic operator returned
#   DONE    request, worker                             answer to SYNC
#   ERROR   serial, operator, device, type, text, traceback, shapes
VALUE, META, DONE, ERROR = "value", "meta", "done", "error"
