"""Whether an answer is said to be cut off."""

from types import SimpleNamespace

import pytest

from verl_ext.rollout.trajectories import at_limit


def worker(response_length, max_model_len, context=10):
    return SimpleNamespace(
        rollout_config=SimpleNamespace(response_length=response_length, max_model_len=max_model_len),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(max_position_embeddings=context)),
    )


@pytest.mark.parametrize(
    ("settings", "prompt", "response", "cut"),
    [
        ((8, 12), 4, 7, False),
        ((8, 12), 4, 8, True),
        ((8, 12), 6, 6, True),  # at the end of the engine's context
        ((8, 12), 6, 5, False),
        ((8, None), 4, 6, True),  # at the end of the model's
        ((8, None), 4, 5, False),
    ],
)
def test_an_answer_is_at_its_limit_by_its_own_length_or_the_contexts(settings, prompt, response, cut):
    output = SimpleNamespace(prompt_ids=[1] * prompt, response_ids=[1] * response)
    assert at_limit(worker(*settings), output) is cut
