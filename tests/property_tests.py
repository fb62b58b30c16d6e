"""A plugin of pytest's, loaded in all lanes: property tests have no deadline and may be slow, as machines are busy."""

import contextlib

with contextlib.suppress(ImportError):  # some lanes lack property tests
    import hypothesis

    hypothesis.settings.register_profile(
        "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("busy")
