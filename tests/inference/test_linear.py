"""The linear probe compared to scikit-learn's logistic regression."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from vitrail.inference import protocols
from vitrail.inference.protocols import Linear, choose_linear, fit_linear

TOLERANCE = 1e-4
"""On every weight; scikit-learn does not converge exactly, either."""


def clusters(count: int, seed: int, classes: int = 4, width: int = 12) -> tuple[Tensor, Tensor]:
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    return 5 + 2 * centres[labels] + 3 * torch.randn(count, width, generator=generator), labels


@pytest.mark.parametrize("decay", [1.0, 1e-2, 1e-3])
@pytest.mark.parametrize("at_once", [2**22, 500])
def test_the_same_optimum_as_scikit_learn(decay: float, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "AT_ONCE", at_once)
    x, y = clusters(200, 0)
    result = fit_linear(x, y, 4, decay=decay, tolerance=1e-8)
    x64 = x.double().numpy()
    standard = (x64 - x64.mean(axis=0)) / (x64.std(axis=0) + 1e-5)
    peer = LogisticRegression(C=1 / (decay * len(x)), tol=1e-10, max_iter=10_000).fit(standard, y.numpy())
    weights, bias = result.weights[:-1].T.numpy(), result.weights[-1].numpy()
    assert np.abs(weights).max() > 0.05
    np.testing.assert_allclose(weights, peer.coef_, atol=TOLERANCE)
    # The solution is unique up to a constant added to every bias.
    np.testing.assert_allclose(bias - bias.mean(), peer.intercept_ - peer.intercept_.mean(), atol=TOLERANCE)
    probabilities = result.scores(x).softmax(dim=1).numpy()
    np.testing.assert_allclose(probabilities, peer.predict_proba(standard), atol=TOLERANCE)


def test_the_gradient_is_that_of_the_loss() -> None:
    x, y = clusters(30, 0)
    mean, scale = protocols._statistics(x)
    weights = torch.randn(13, 4, dtype=torch.float64)
    loss, gradient = protocols._loss_and_gradient(x, y, mean, scale, weights, 0.3)
    free = weights.clone().requires_grad_()
    logits = ((x.double() - mean) / scale) @ free[:-1] + free[-1]
    expected = torch.nn.functional.cross_entropy(logits, y) + 0.15 * free[:-1].square().sum()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, free.grad)


def test_a_warm_start_reaches_the_same_solution() -> None:
    x, y = clusters(100, 0)
    near = fit_linear(x, y, 4, decay=0.1)
    fresh, warm = (fit_linear(x, y, 4, decay=0.01, start=start, tolerance=1e-9) for start in (None, near))
    torch.testing.assert_close(fresh.weights[:-1], warm.weights[:-1], atol=1e-6, rtol=0)
    assert near.decay == 0.1


def test_the_validation_split_selects_the_decay() -> None:
    """Few examples with half of the labels wrong: more regularisation is better, as the validation split shows."""
    x, y = clusters(60, 0)
    noisy = y.clone()
    generator = torch.Generator().manual_seed(1)
    noisy[torch.randperm(60, generator=generator)[:30]] = torch.randint(0, 4, (30,), generator=generator)
    val_x, val_y = clusters(400, 1)
    steps: list[tuple[int, int]] = []
    decays = (1e-4, 1.0, 0.1)
    chosen = choose_linear(x, noisy, val_x, val_y, 4, decays=decays, on_progress=lambda *step: steps.append(step))

    def right(result: Linear) -> float:
        return float((result.scores(val_x).argmax(dim=1) == val_y).double().mean())

    every = {decay: right(fit_linear(x, noisy, 4, decay=decay)) for decay in decays}
    assert right(chosen) == max(every.values()) > every[1e-4] + 0.05
    assert steps == [(1, 3), (2, 3), (3, 3)]
