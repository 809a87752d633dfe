from best_of_probes import BestOfProbes, BestOfProbesSettings

from verl_ext.testing import allocator_contract


def test_it_keeps_the_contract():
    allocator_contract(lambda: BestOfProbes(BestOfProbesSettings(group_size=8)))
