"""The laboratory's trees give what plain, padded sequences give: log-probabilities, losses, gradients, samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from verl_ext.allocation import Group, Request, reward_statistics
from verl_ext.lab.decoder import Decoder, DecoderSettings, Forest
from verl_ext.lab.engine import Engine, Trajectory
from verl_ext.lab.policies import success_rates
from verl_ext.lab.update import Row, Trainer, UpdateSettings, advantages, loss
from verl_ext.tiny.policy import make_policy
from verl_ext.tiny.task_settings import PolicySettings
from verl_ext.tiny.tokens import END_ID

PROMPTS = [tuple(b"9+8+7="), tuple(b"1+2="), tuple(b"5+5+5+5=")]
ANSWERS = {0: [(50, 52, END_ID), (50, 52, END_ID), (49, 52, END_ID), (52, END_ID)], 1: [(51, END_ID), (50, END_ID)],
           2: [(50, 48, 51), (50, 48, END_ID), (50, 49, END_ID)]}  # fmt: skip


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    reference = make_policy(PolicySettings())
    for p in reference.parameters():
        p.data.normal_(0, 0.12)
    policy = Decoder(DecoderSettings.of(reference.config.to_dict()))
    policy.load_qwen2(reference.state_dict())
    return policy, reference


def plain_log_probs(reference, prompt, answer):
    logits = reference(input_ids=torch.tensor([[*prompt, *answer]])[:, :-1]).logits.log_softmax(-1)[0]
    return logits[len(prompt) - 1 :].gather(1, torch.tensor(answer)[:, None])[:, 0]


def test_a_tree_of_answers_has_the_log_probabilities_of_transformers_qwen2(models):
    policy, reference = models
    forest, paths = Forest(), []
    for row, prompt in enumerate(PROMPTS):
        last = forest.add_tree(prompt)
        paths += [(prompt, answer, forest.add_path(last, answer)) for answer in ANSWERS[row]]
    log_probs = policy.log_probabilities(policy(forest.plant()))
    for prompt, answer, path in paths:
        expected = plain_log_probs(reference, prompt, answer)
        assert torch.allclose(log_probs[path, list(answer)], expected, atol=2e-5)
    assert len(forest.ids) < sum(len(p) + len(a) for p, a, _ in paths)  # what is shared is there once


def rows(rng, reference):
    made = []
    for row, answers in ANSWERS.items():
        for answer in answers:
            now = plain_log_probs(reference, PROMPTS[row], answer).detach().numpy()
            old = (now + rng.normal(0, 0.3, len(answer))).astype(np.float32)
            old = old if answer != ANSWERS[0][0] else now  # two rows that are alike
            made.append(Row(f"g{row}", Trajectory(row, answer, old), float(len(answer) - 2.4)))
    return made


def plain_loss(reference, made, settings, horizon):
    """verl's, a row at a time and without sharing anything."""
    costs = []
    for row in made:
        u = plain_log_probs(reference, PROMPTS[row.trajectory.prompt], row.trajectory.tokens)
        ratio = (u - torch.from_numpy(row.trajectory.log_probs)).clamp(-20, 20).exp()
        a = row.advantage
        cost = torch.maximum(-a * ratio, -a * ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high))
        costs.append(torch.minimum(cost, torch.tensor(-a * settings.clip_ratio_c)) if a < 0 else cost)
    if settings.loss_agg_mode == "token-mean":
        return torch.cat(costs).mean()
    if settings.loss_agg_mode == "seq-mean-token-mean":
        return torch.stack([c.mean() for c in costs]).mean()
    total = torch.stack([c.sum() for c in costs]).mean()
    return total / horizon if settings.loss_agg_mode == "seq-mean-token-sum-norm" else total


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_packed_loss_and_gradient_equal_the_plain_ones(models, mode):
    policy, reference = models
    settings = UpdateSettings(loss_agg_mode=mode, clip_ratio_low=0.15, clip_ratio_high=0.25)
    made = rows(np.random.default_rng(1), reference)
    policy.zero_grad()
    reference.zero_grad()
    ours, expected = loss(policy, PROMPTS, made, settings, 3), plain_loss(reference, made, settings, 3)
    ours.backward()
    expected.backward()
    assert ours.item() == pytest.approx(expected.item(), abs=1e-5)
    theirs = dict(reference.named_parameters())
    for name, p in policy.named_parameters():
        assert torch.allclose(p.grad, theirs[name].grad, atol=3e-5), name


def test_advantages_are_verls():
    verl = pytest.importorskip("verl.trainer.ppo.core_algos")
    scores = [1.0, 0.0, 0.0, 0.5, 1.0]
    rewards, mask, index = torch.tensor(scores)[:, None], torch.ones(5, 1), np.array(["g"] * 5)
    over = reward_statistics(scores)
    for settings, expected in (
        (UpdateSettings(), verl.compute_grpo_outcome_advantage(rewards, mask, index)),
        (UpdateSettings(norm_adv_by_std_in_grpo=False),
         verl.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)),
        (UpdateSettings(adv_estimator="rloo"), verl.compute_rloo_outcome_advantage(rewards, mask, index)),
    ):  # fmt: skip
        assert advantages(scores, over, settings) == pytest.approx(expected[0][:, 0].numpy(), abs=1e-6)


def test_loss_is_verls(models):
    verl = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import ActorConfig

    policy, reference = models
    made = rows(np.random.default_rng(2), reference)
    width = 3
    old, now, mask, adv = (torch.zeros(len(made), width) for _ in range(4))
    for i, row in enumerate(made):
        n = len(row.trajectory.tokens)
        old[i, :n] = torch.from_numpy(row.trajectory.log_probs)
        now[i, :n] = plain_log_probs(reference, PROMPTS[row.trajectory.prompt], row.trajectory.tokens).detach()
        mask[i, :n], adv[i, :n] = 1, row.advantage
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=3.0)
        expected, _ = verl.compute_policy_loss_vanilla(old, now, adv, mask, loss_agg_mode=mode, config=config)
        ours = loss(policy, PROMPTS, made, dataclasses.replace(UpdateSettings(), loss_agg_mode=mode), width)
        assert ours.item() == pytest.approx(expected.item(), abs=1e-5)


def score(row, answer):
    return answer == (50, 52), float(answer == (50, 52))


def test_sampling_follows_the_policy(models):
    policy, reference = models
    engine = Engine(policy, PROMPTS, score, 2, seed=3)
    group = Group("g0", 1, 1)
    n = 6000
    group_request = Request(group, n)
    group.requested = n
    outcomes = engine.generate([group_request])
    assert len(outcomes) == n
    first = torch.tensor([engine.trajectories["g0", s].tokens[0] for s in range(n)])
    p = reference(input_ids=torch.tensor([PROMPTS[1]])).logits[0, -1].softmax(-1).detach()
    seen = torch.bincount(first, minlength=len(p)) / n
    top = p.topk(8).indices
    assert (seen[top] - p[top]).abs().max() < 5 * (0.25 / n) ** 0.5
    for s in range(0, n, 500):
        t = engine.trajectories["g0", s]
        expected = plain_log_probs(reference, PROMPTS[1], t.tokens).detach().numpy()
        assert t.log_probs == pytest.approx(expected, abs=2e-5)
        assert outcomes[s].response_tokens == len(t.tokens)
        assert outcomes[s].truncated == (t.tokens[-1] != END_ID)


def test_rollouts_are_the_same_in_one_round_or_two_and_fresh_after_an_update(models):
    policy, _ = models

    def draw(parts):
        engine = Engine(policy, PROMPTS, score, 3, seed=5)
        group = Group("g0", 0, 1)
        for n in parts:
            request = Request(group, n)
            group.requested += n
            engine.generate([request])
        return [engine.trajectories["g0", s].tokens for s in range(8)]

    assert draw([8]) == draw([3, 5])
    engine = Engine(policy, PROMPTS, score, 3, seed=5)
    groups = [Group("g0", 0, 1), Group("g1", 0, 2)]
    for group in groups:
        request = Request(group, 8)
        group.requested = 8
        engine.generate([request])
    tokens = [[engine.trajectories[uid, s].tokens for s in range(8)] for uid in ("g0", "g1")]
    assert tokens[0] != tokens[1]  # another visit draws anew


def test_success_rates_are_products_of_token_probabilities(models):
    policy, reference = models
    pairs = [(PROMPTS[0], (50, 52)), (PROMPTS[1], (51,))]
    expected = [plain_log_probs(reference, p, (*a, END_ID)).sum().exp().item() for p, a in pairs]
    assert success_rates(policy, pairs).tolist() == pytest.approx(expected, rel=1e-4)


def test_an_update_raises_the_probability_of_what_was_rewarded(models):
    policy, _ = models
    import copy

    policy = copy.deepcopy(policy)
    settings = UpdateSettings(lr_warmup_steps=0, lr=1e-3, mini_batches=1)
    trainer = Trainer(policy, settings, PROMPTS, 3)
    old = np.zeros(3, np.float32) - 5
    made = [Row("g0", Trajectory(0, (50, 52, END_ID), old), 1.0), Row("g0", Trajectory(0, (49, 52, END_ID), old), -1.0)]
    pair = [(PROMPTS[0], (50, 52))]
    before = success_rates(policy, pair).item()
    for _ in range(5):
        trainer.update(made)
    assert success_rates(policy, pair).item() > before
    assert trainer.optimizer_steps == 5
