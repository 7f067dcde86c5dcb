"""Hypothesis without deadlines: how long an example takes says how busy the machine is, and nothing of the code."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
