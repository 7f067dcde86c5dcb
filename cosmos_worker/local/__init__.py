"""Runs the bundled application on this machine: a controller, trainer ranks and rollout workers, each its own process."""
