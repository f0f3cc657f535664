"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes tells how busy the machine is, and nothing of the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
