"""The reference application: a small language model trained with GRPO on verifiable tasks.

Only `train` and `rollout`, its two loops, know of the control plane. `config` and `tasks` import no torch, so a controller can read the
prompts; `engine` is what a rollout worker holds, `learner` what a trainer rank holds, and `payload` is how one
completion travels between them.
"""
