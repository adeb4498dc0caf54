"""Plan: how a model is spread over hardware, as data."""

from outsize.lazy import called
from outsize.plan.approximate import APPROXIMATE, Local
from outsize.plan.plan import DEVICE, DISK, FILES, Plan, Precision, Rest, Stage, Stream
from outsize.plan.spread import Pipelined, Sharding, zero
from outsize.plan.text import explain, from_yaml, to_yaml

called(__name__, "outsize.train.planned")  # outsize.plan(...)
