"""In place of the trainer: three steps of metrics; the runs y-seed0 and x-seed1 are cut off once, and resume."""

import json
import os
import sys

arguments = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
folder = arguments["trainer.default_local_dir"]
path = os.path.join(folder, "metrics.jsonl")
done = sum(1 for _ in open(path)) if os.path.exists(path) else 0
with open(os.path.join(folder, "config.yaml"), "w") as config:
    config.write("trainer: {total_training_steps: 3}")
print("from step", done, "with", os.environ.get("GIVEN"))
with open(path, "a") as file:
    for step in range(done, 4):
        if step == 2 and folder.endswith(("y-seed0", "x-seed1")) and not done:
            sys.exit("cut off")
        data = {"val-core/s/acc/mean@8": 0.1 * step, "allocation/rollouts": 64 * step, "allocation/tokens": 9 * step}
        file.write(json.dumps({"step": step, "data": data}) + "\n")
