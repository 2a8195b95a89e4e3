"""The chunked distillation loss against its plain twin, values and gradients."""

import math

import pytest
import torch
from torch.nn import functional as F

from ladder_residual.adapt.distillation import (
    Distillation,
    LossWeights,
    chunked_distillation,
    relative_distance,
)
from ladder_residual.data.corpus_rows import IGNORE_INDEX
from ladder_residual.train.loss import Head, next_token_targets

VOCAB, HIDDEN = 97, 16
WEIGHTS = [
    LossWeights(),
    LossWeights(data=0.3),
    LossWeights(teacher=0.5, data=1.0, temperature=2.0),
    LossWeights(temperature=1.5, top_k=5),
    LossWeights(data=0.1, top_k=VOCAB + 5),
]


def token_divergence(student, teacher, temperature=1.0, top_k=0):
    """KL(teacher || student) for each row of logits, in nats, times the temperature squared (gradients keep their size)."""
    log_q = F.log_softmax(student.float() / temperature, -1)
    log_p = F.log_softmax(teacher.float() / temperature, -1)
    if not top_k:
        return (log_p.exp() * (log_p - log_q)).sum(-1) * temperature**2
    log_p_top, words = log_p.topk(min(top_k, log_p.shape[-1]), -1)
    log_q_top = log_q.gather(-1, words)
    p_rest = (1 - log_p_top.exp().sum(-1)).clamp_min(1e-9)
    q_rest = (1 - log_q_top.exp().sum(-1)).clamp_min(1e-9)
    among_top = (log_p_top.exp() * (log_p_top - log_q_top)).sum(-1)
    return (among_top + p_rest * (p_rest.log() - q_rest.log())) * temperature**2


def plain_distillation(hidden, head, teacher_hidden, teacher_head, labels, weights):
    """The slow twin, which autograd differentiates; shapes as in ``chunked_distillation``."""
    logits, teacher = head.logits(hidden), teacher_head.logits(teacher_hidden)
    divergence = token_divergence(logits, teacher, weights.temperature, weights.top_k).mean()
    entropy = F.cross_entropy(logits.flatten(0, 1), next_token_targets(labels), ignore_index=IGNORE_INDEX)
    return Distillation(weights.teacher * divergence + weights.data * entropy, divergence.detach(), entropy.detach())


def batch():
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    hidden, weight = draw(3, 11, HIDDEN).requires_grad_(), draw(VOCAB, HIDDEN).requires_grad_()
    teacher_hidden, teacher_weight = draw(3, 11, HIDDEN), draw(VOCAB, HIDDEN)
    labels = torch.randint(0, VOCAB, (3, 11), generator=generator)
    labels[:, 2:5] = -100
    return hidden, weight, teacher_hidden, teacher_weight, labels


@pytest.mark.parametrize("scaling", [(1.0, None), (3.0, 20.0)], ids=["plain", "scaled and capped"])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("chunk", [7, 64])
def test_chunks_give_the_plain_loss_and_its_gradients(weights, chunk, scaling):
    hidden, weight, teacher_hidden, teacher_weight, labels = batch()
    head = Head(weight, scaling=scaling[0], softcap=scaling[1])
    teacher_head = Head(teacher_weight, scaling=scaling[0], softcap=scaling[1])
    plain = plain_distillation(hidden, head, teacher_hidden, teacher_head, labels, weights)
    chunked = chunked_distillation(hidden, head, teacher_hidden, teacher_head, labels, weights, chunk=chunk)
    torch.testing.assert_close(tuple(chunked), tuple(plain), rtol=1e-5, atol=1e-6)
    for ours, reference in zip(
        torch.autograd.grad(chunked.total, [hidden, weight]), torch.autograd.grad(plain.total, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiled_rule_equals_the_eager_one():
    hidden, weight, teacher_hidden, teacher_weight, labels = batch()
    for weights in WEIGHTS[:2]:
        results = [
            chunked_distillation(
                hidden, Head(weight), teacher_hidden, Head(teacher_weight), labels, weights, chunk=11, compiled=compiled
            )
            for compiled in (False, True)
        ]
        torch.testing.assert_close(tuple(results[1]), tuple(results[0]))
        gradients = [torch.autograd.grad(result.total, [hidden, weight]) for result in results]
        torch.testing.assert_close(gradients[1], gradients[0])


def test_divisors_make_parts_add_up_to_the_whole():
    hidden, weight, teacher_hidden, teacher_weight, labels = batch()
    labels[0, :] = -100  # rows with unequal numbers of answers
    weights = LossWeights(data=0.5)
    whole = chunked_distillation(hidden, Head(weight), teacher_hidden, Head(teacher_weight), labels, weights)
    count = (labels[:, 1:] != -100).sum()
    parts = sum(
        chunked_distillation(
            hidden[row : row + 1],
            Head(weight),
            teacher_hidden[row : row + 1],
            Head(teacher_weight),
            labels[row : row + 1],
            weights,
            tokens=labels.numel(),
            divisor=count,
        ).total
        for row in range(3)
    )
    torch.testing.assert_close(parts, whole.total)


def test_padding_counts_for_nothing():
    hidden, weight, teacher_hidden, teacher_weight, labels = batch()
    labels[:, 8:] = -100
    counted = torch.ones_like(labels, dtype=torch.bool)
    counted[:, 8:] = False
    weights = LossWeights(data=0.5)
    heads = Head(weight), Head(teacher_weight)
    masked = chunked_distillation(hidden, heads[0], teacher_hidden, heads[1], labels, weights, counted=counted)
    short = chunked_distillation(hidden[:, :8], heads[0], teacher_hidden[:, :8], heads[1], labels[:, :8], weights)
    torch.testing.assert_close(tuple(masked), tuple(short))
    gradients = [torch.autograd.grad(loss.total, [hidden, weight]) for loss in (masked, short)]
    torch.testing.assert_close(*gradients)


def test_a_perfect_student_has_no_loss_and_no_gradient():
    hidden, weight, *_, labels = batch()
    for weights in (LossWeights(), LossWeights(temperature=3.0), LossWeights(top_k=4)):
        loss = chunked_distillation(hidden, Head(weight), hidden.detach(), Head(weight.detach()), labels, weights)
        gradient = torch.autograd.grad(loss.total, hidden)[0]
        assert loss.total.abs() < 1e-5
        assert gradient.abs().max() < 1e-6


def test_divergence_is_what_torch_says():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 33, generator=generator)
    reference = torch.nn.functional.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(token_divergence(student, teacher), reference)
    assert (token_divergence(student, teacher, top_k=3) <= reference + 1e-6).all()  # merging words can only hide differences


def test_distance_of_states_sees_every_token():
    teacher = torch.randn(2, 7, 5)
    teacher[:, 0] *= 1000
    student = teacher.clone()
    student[:, 1:] = 0
    assert relative_distance(student, teacher) == pytest.approx(6 / 7 * math.log(2), rel=1e-5)
    assert relative_distance(teacher, teacher) == 0


@pytest.mark.parametrize("bad", [{"teacher": 0}, {"data": -1}, {"temperature": 0}, {"top_k": -1}])
def test_nonsense_weights_are_refused(bad):
    with pytest.raises(ValueError, match=r"-1|0"):
        LossWeights(**bad)
