"""Contracts that any rule can be put through, for the tests of packages outside this one.

Plain functions; each raises AssertionError saying what does not hold, on which data and in which step. They import no
verl, Ray, PyTorch or test framework::

    from verl_ext.testing import allocator_contract

    def test_my_rule():
        allocator_contract(lambda: make_allocator("my_rule", group_size=8))
"""

from .allocators import allocator_contract
from .downsamplers import downsampler_contract
from .selectors import selector_contract
from .trial import Trial, decisions, same

__all__ = ["Trial", "allocator_contract", "decisions", "downsampler_contract", "same", "selector_contract"]
