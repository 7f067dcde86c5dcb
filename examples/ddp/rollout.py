from app import rollout

from cosmos_worker.errors import exit_codes
from cosmos_worker.rollout import SyncRollout

with exit_codes(), SyncRollout.from_env() as worker:
    for group in worker.groups(in_flight=4):
        one = rollout(group.prompt()["prompt"])
        worker.report_group(group, rewards=[one["reward"]], payloads=[one])
