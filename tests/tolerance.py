"""The tolerances of every fp32 comparison in the suite; no test widens them for itself."""

RTOL = 1e-4
ATOL = 1e-6
