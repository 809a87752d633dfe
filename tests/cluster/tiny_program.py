"""A driver in place of the trainer: runs a task on every node of the cluster, then does what it is told.

tiny_program.py [exit=N] [sleep=S] [nodes=N]
"""

import os
import sys
import time

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)


@ray.remote(num_gpus=1)
def where():
    import socket

    return socket.gethostname()


nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
names = ray.get(
    [where.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n, soft=False)).remote() for n in nodes]
)
print("ran on", " ".join(sorted(names)), flush=True)
# Left behind by a driver that is killed, unless whoever kills it takes care.
time.sleep(float(arguments.get("sleep", 0)))
sys.exit(int(arguments.get("exit", 0)))
