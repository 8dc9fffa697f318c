"""How many examples the properties are tried on: HYPOTHESIS_PROFILE=dev, ci or long."""

import os

from hypothesis import HealthCheck, settings

# The first example of a property compiles, so time limits on examples mean nothing here.
settings.register_profile(
    "dev", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "ci", settings.get_profile("dev"), max_examples=100, derandomize=True, print_blob=True
)
settings.register_profile("long", settings.get_profile("dev"), max_examples=2000)

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
