"""What workers measure while a profile runs, and how they tell: the answer to PROFILE.

An answer is a msgpack list [begin, now, lost, steps, records, rows, replays]:

    begin, now    when measuring began, and what the clock says now
    lost          number of rows for which there was no room
    steps         [kind, axis, spec, spec] of each redistribution step that a row names
    records       number of a record -> for each of its steps: plan, or -1 where it is no operator, and the number of the
                  operator within the record; flat
    rows          flat; each is five numbers: one of the kinds below, a number, the serial of the operator or -1, start, end
    replays       [record, serial, start, end, the time after each of its steps, those after a failure left out]

Times are nanoseconds of the machine's monotonic clock. A row may lie within another: a collective within its operator,
that within a replay, and all within their batch.
"""

from __future__ import annotations

WIDTH = 5
(
    OPERATOR,  # number of the plan
    RECORD,  # of replays, as clients tell them apart
    COLLECTIVE,  # number of the step
    WORD,  # the same: waiting for the devices that a step's data come from
    COMMAND,  # its code
    DECODING,  # of a batch
    FREEING,  # memory
    BATCH,
) = range(8)
