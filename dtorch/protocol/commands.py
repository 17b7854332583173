"""The command stream of a session: one flat list of plain values a batch.

A batch payload is a msgpack list of commands laid out flat, followed by raw buffers as further frames. A command is its
code and then its operands, so that running a cached operator costs the client one ``list.extend``:

    code >= FIRST_PLAN   run plan (code - FIRST_PLAN): input ids, scalars, then the id of the first new result
    negative                               forget tensor -code
    MESH      id, shape, devices, workers  the mesh's devices and the worker of each
    SPEC      id, data                     a tensor spec (protocol.values.encode_spec)
    PLAN      id, data                     a plan (protocol.plans.encode_plan)
    PUT       id, spec, frame              a tensor from the buffer in that frame: every device keeps its part
    FETCH     request, id, spec, positions, path   the values held at these positions of the mesh, in the reply or, with
                                           a path, at their places in the client's shared memory (see MAP), where the
                                           whole tensor lies in the spec's memory order; other workers of it confirm
    SEED      generator, seed              (re)start a generator; forget it when the seed is None
    STATE     generator, id, spec          the generator's state as a replicated uint8 tensor
    RESTORE   generator, id                set the generator to that state
    SYNC      request                      confirm that everything before is done
    COUNT     serial                       number of the next operator, for a worker that joins later
    MAP       file, path                   the client's shared memory, a memfd that cannot shrink, as /proc/<pid>/fd/<n>
    OPEN      request, file, path, size, mtime   a file of this many bytes, last changed then (ns); each worker answers
                                           whether it has just that file and may read it
    CLOSE     file                         forget a file or shared memory
    LOAD      id, spec, file, offset, dtype, box, name   the part ``box`` of a tensor, which is there in row-major order;
                                           the first part makes the tensor. Numbered as an operator is. With a negative
                                           file the bytes are in that frame
    RECORD    id, data                     commands to run again and again (protocol.records); forget them when it is None
    MEMORY    request, what                HELD: bytes that tensors hold now and at most (msgpack, in a VALUE of one position,
                                           the worker's number); ANEW: the same, and count the most anew; EACH: [id of a
                                           tensor, [[number of the memory, bytes] of each part here]] of all of them;
                                           SPARE: give spare memory back to the system, bytes as far as they are known
    LIMIT     bytes                        what tensors may occupy on each device; an operator that needs more fails
    SAVE      save, directory              begin a save into this directory; forget it when that is None
    WRITE     save, file, id, spec, offset, positions, last   copy what these positions of the mesh hold and write it, while
                                           other commands run, into a file that is there, whose row-major bytes of the
                                           whole tensor begin at the offset; after the last one, sync and say SAVED
    PROFILE   request, goes on             what has been measured since the last time, see protocol.events (in a VALUE of one
                                           position, the worker's number); measuring begins with the first, and ends
                                           with one that does not go on
    REPLAY    record, ids of its arguments, id of the first result   run a record. Numbered as one operator
"""

from __future__ import annotations

(
    MESH, SPEC, PLAN, PUT, FETCH, SEED, STATE, RESTORE, SYNC, COUNT, MAP, OPEN, CLOSE, LOAD, RECORD, REPLAY, MEMORY, SAVE,
    WRITE, PROFILE, LIMIT,
) = range(21)  # fmt: skip
FIRST_PLAN = 32
HELD, ANEW, EACH, SPARE = range(4)

# Replies from a worker: a msgpack list [kind, ...] and raw buffers as further frames.
#   VALUE   request, worker, positions, error or None   buffers: one a position
#   META    request, [[shape, stride, dtype], ...], error or None   what a dynamic operator returned
#   DONE    request, worker, error or None              answer to SYNC and OPEN; the error is a [type, text]
#   SAVED   save, worker, error or None                 all that the worker writes of a save is on the disk, or why not
#   ERROR   serial, operator, device, type, text, traceback, inputs, step   the inputs as texts: spec, shape of the piece;
#                                                      within a REPLAY, step is the number of the operator in the record
# The error of VALUE and META is [serial of the operator that failed, text].
VALUE, META, DONE, SAVED, ERROR = "value", "meta", "done", "saved", "error"


def is_unasked(reply: bytes | bytearray | memoryview) -> bool:
    """Whether the first frame of a reply says SAVED or ERROR, which come at any time, and again after a loss.

    Told by how msgpack writes a list that begins with that text.
    """
    return bytes(reply[1:7]) in (b"\xa5saved", b"\xa5error")
