"""Worker side of cosmos-ctrl: the two loops that training and rollout processes run.

`cosmos_worker.trainer.Trainer` and `cosmos_worker.rollout.Rollout` are the faces; everything of the wire stays behind them.
Only a trainer with a process group, and the reference application, import torch.
"""
