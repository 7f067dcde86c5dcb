"""Worker side of cosmos-ctrl: the two loops that training and rollout processes run.

`cosmos_worker.trainer.Trainer` and `cosmos_worker.rollout.Rollout` are the faces; everything of the wire stays behind them.
Torch is imported by a trainer with a process group or with asynchronous saves, by `cosmos_worker.dcp` and `cosmos_worker.state`, and by the
reference application; by nothing else.
"""

import os

# A process that is forked off, such as a data loader's worker, has no use for the channel; gRPC's own handlers for it crash one in fifteen.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
