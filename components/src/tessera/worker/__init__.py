"""Worker processes: encode, embed, and both in one.

OpenMP reads its settings when torch brings it in. Its threads spin for 3 ms where an operation ends, unless
their process has made more of them than there are processors. Four workers on two cores took each other's
processors by that: 20 mixed requests a second took 235 and 299 ms (p50), where they take 12 without.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
