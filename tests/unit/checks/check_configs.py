"""Configurations for the tests of the checks: composed once, changed key by key."""

import os
from functools import cache
from unittest import mock

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import verl_ext.main_ppo  # noqa: F401  (registers the configuration's resolvers)
from verl_ext.checks import Checks, State
from verl_ext.checks.local import check_inputs, check_settings, check_with_verl

NOWHERE = "/nonexistent/verl_ext"
"""Stands for the cache of the tiny task, which need not be made for these tests."""


@cache
def _composed(overrides, resolved):
    with initialize_config_module("verl_ext.configs", version_base=None):
        config = compose("main", overrides=list(overrides))
    OmegaConf.set_struct(config, False)
    if resolved:  # which takes longer than the checks
        with mock.patch.dict(os.environ, VERL_EXT_CACHE=NOWHERE):
            OmegaConf.resolve(config)
    return config


def config_with(*overrides, resolved=True, **values):
    """recipe=cpu/sara, or what the overrides say, with values by dotted name."""
    config = _composed(overrides or ("recipe=cpu/sara",), resolved).copy()
    for name, value in values.items():
        OmegaConf.update(config, name, value, merge=False)
    return config


def problems_of(config, with_verl=True):
    """All problems of the checks that need no cluster, with the name of the check."""
    checks = Checks()
    settings = check_settings(config, checks)
    if checks.findings[0].state is not State.OK:
        return found(checks)
    inputs = check_inputs(config, checks)
    if with_verl:
        OmegaConf.resolve(config)
        check_with_verl(config, checks, settings, inputs)
    return found(checks)


def found(checks, state=State.PROBLEM):
    return [f"{finding.check}: {finding.text}" for finding in checks.findings if finding.state is state]
