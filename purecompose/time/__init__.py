"""Training time: durations such as "90ep" or "0.5dur", run lengths and timestamps.

Everything here is host arithmetic on immutable values. The counters of a `Timestamp` are the only source of time in
the library; the time in traced code (`state.clock`) is filled from them.
"""

from purecompose._support import publish
from purecompose.time import predicates as predicates
from purecompose.time.event import Time as Time, TimeLike as TimeLike, TimeUnit as TimeUnit, UnitError as UnitError
from purecompose.time.timestamp import RunLength as RunLength, Timestamp as Timestamp


publish(__name__)
