"""verify: a plan against plain PyTorch, parameter by parameter."""

from outsize.verify.case import Adopted, Case, Native, Subject
from outsize.verify.compare import LIMIT, Comparison
from outsize.verify.verify import Verdict, verify
