"""Property tests draw the same examples every time; ``EXAMPLES=20`` draws twenty times as many, anew each run."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "allocation",
    deadline=None,
    derandomize="EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("allocation")
