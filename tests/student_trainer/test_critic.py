"""The critic's loss by hand, and together with the fused operator on the same states."""

import torch

from student_trainer.critic import Critic, value_loss
from student_trainer.losses import (
    clipped_surrogate,
    fused_linear_loss,
    gae,
    reward_at_last_token,
    token_log_ratio,
)


def test_value_loss_by_hand():
    # A value near its old value, one too far towards its target, and one too far away from it.
    values = torch.tensor([0.1, 0.9, -0.9], dtype=torch.float64, requires_grad=True)
    losses = value_loss(values, torch.zeros(3), torch.ones(3), clip=0.2)
    expected = torch.tensor([0.9**2 / 2, 0.8**2 / 2, 1.9**2 / 2], dtype=torch.float64)
    torch.testing.assert_close(losses, expected)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([-0.9, 0.0, -1.9], dtype=torch.float64))


def test_one_pass_over_the_states_serves_policy_and_critic():
    """Against autograd in float64; the body's gradient is the policy's alone."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n, vocab, width = 12, 30, 6
    body, weight = randn(4, width).requires_grad_(), randn(vocab, width).requires_grad_()
    inputs, tokens = randn(n, 4), torch.randint(vocab, (n,), generator=generator)
    critic = Critic(width).double()
    torch.nn.init.normal_(critic.linear.weight, generator=generator)
    lengths = torch.tensor([3, 4, 5])
    sequence = torch.arange(3).repeat_interleave(lengths)
    rewards = reward_at_last_token(randn(3), lengths)
    old_values = critic((inputs @ body).detach()).detach()
    advantages, targets = gae(rewards, old_values, sequence, gamma=1.0, lam=0.9)
    sampling = (inputs @ body @ weight.T).log_softmax(1).gather(1, tokens[:, None])[:, 0].detach()
    leaves = [body, weight, critic.linear.weight, critic.linear.bias]

    hidden = (inputs @ body).tanh()
    fused = fused_linear_loss(
        hidden,
        weight,
        torch.zeros(n, 0, dtype=torch.long),
        tokens,
        lambda rows, index: clipped_surrogate(
            token_log_ratio(rows.token_logprobs, sampling[index]),
            advantages[index],
            clip_low=0.2,
            clip_high=0.28,
        ),
        chunk_rows=5,
    )
    critic_loss = value_loss(critic(hidden), old_values, targets, clip=0.2).sum()
    gradients = torch.autograd.grad(fused.loss_sum + critic_loss, leaves)

    hidden = (inputs @ body).tanh()
    logprobs = (hidden @ weight.T).log_softmax(1).gather(1, tokens[:, None])[:, 0]
    ratio = (logprobs - sampling).exp()
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum()
    values = hidden.detach() @ critic.linear.weight[0] + critic.linear.bias
    clipped_values = torch.minimum(torch.maximum(values, old_values - 0.2), old_values + 0.2)
    squares = torch.maximum((values - targets) ** 2, (clipped_values - targets) ** 2).sum() / 2
    for gradient, expected_gradient in zip(
        gradients, torch.autograd.grad(surrogate + squares, leaves), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)


def test_it_learns_what_is_to_be_expected():
    """Two kinds of answers with different states; one kind is rewarded three times in four."""
    generator = torch.Generator().manual_seed(0)
    critic = Critic(2)
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.03)
    lengths = torch.full((1024,), 3)
    sequence = torch.arange(1024).repeat_interleave(lengths)
    kind = torch.arange(1024) % 2
    states = torch.nn.functional.one_hot(kind, 2).float().repeat_interleave(lengths, 0)
    for _ in range(100):
        chance = torch.where(kind == 1, 0.75, 0.25)
        rewards = torch.bernoulli(chance, generator=generator)
        old = critic(states).detach()
        _, targets = gae(reward_at_last_token(rewards, lengths), old, sequence, gamma=1.0, lam=0.95)
        optimizer.zero_grad()
        value_loss(critic(states), old, targets, clip=0.2).mean().backward()
        optimizer.step()
    values = critic(torch.eye(2)).detach()
    torch.testing.assert_close(values, torch.tensor([0.25, 0.75]), atol=0.06, rtol=0)
