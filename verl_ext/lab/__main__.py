# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.lab recipes=[grpo,sara] task=balanced seeds=[0,1] output=lab.json`: real learning, compared.

A toy world, but real gradients: the rules of `allocation` around a policy of half a million parameters, in PyTorch.
"""

from __future__ import annotations

import os
import sys

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # runs are processes of one thread each

import hydra  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402

from verl_ext.allocation import SettingError  # noqa: E402
from verl_ext.configuration import CONFIG_PATH  # noqa: E402
from verl_ext.files import restrict_umask  # noqa: E402
from verl_ext.lab.study import study  # noqa: E402


@hydra.main(config_path=CONFIG_PATH, config_name="lab", version_base=None)
def main(config: DictConfig) -> None:
    """Run what is missing, then print the comparison and draw the curves."""
    restrict_umask()
    try:
        study(OmegaConf.to_container(config, resolve=True))
    except SettingError as error:
        sys.exit(f"verl_ext.lab: {str(error).removeprefix('allocation.')}")


if __name__ == "__main__":
    main()
