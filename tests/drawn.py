"""How much Hypothesis draws: the same in each run, and more where it has the night."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

#: How many times as many examples as every day.
MORE = int(os.environ.get("DISTLOCK_TEST_EXAMPLES", "1"))


def drawn(examples: int, steps: int = 50) -> settings:
    """Return the settings of a test that draws so many examples every day."""
    return settings(
        max_examples=examples * MORE,
        # What fails is repeated by running it again; at full size other examples come each time.
        derandomize=MORE == 1,
        database=None,
        deadline=None,
        # The fixtures of a test stay as they are for all examples.
        suppress_health_check=[*HealthCheck],
        print_blob=True,
        stateful_step_count=steps,
    )
