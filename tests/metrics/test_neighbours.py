"""Nearest neighbours compared to scikit-learn."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.inference import protocols
from vitrail.metrics.neighbours import vote


def weights(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = np.exp((1 - distances) / 0.07)
    return result


def reference(k: int, examples: Tensor, labels: Tensor) -> KNeighborsClassifier:
    peer = KNeighborsClassifier(k, weights=weights, algorithm="brute", metric="cosine")
    return peer.fit(examples.numpy(), labels.numpy())


@pytest.mark.parametrize("k", [1, 10, 20, 100, 200])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_same_predictions_as_scikit_learn(k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "AT_ONCE", 1000)  # several chunks, the last one smaller
    centres = torch.randn(6, 16, dtype=dtype)
    labels = torch.randint(0, 6, (300,))
    examples = centres[labels] + 2 * torch.randn(300, 16, dtype=dtype)
    test = 3 * (centres.repeat(20, 1) + 2 * torch.randn(120, 16, dtype=dtype))
    votes = vote(examples, labels, test, 6, k=k)
    peer = reference(k, examples, labels)
    assert votes.argmax(dim=1).tolist() == peer.predict(test.numpy()).tolist()
    shares = (votes / votes.sum(dim=1, keepdim=True)).numpy()
    np.testing.assert_allclose(shares, peer.predict_proba(test.numpy()), atol=1e-9 if dtype == torch.float64 else 1e-4)
    if k > 1:
        assert ((shares > 0).sum(axis=1) > 1).any()


def test_ties_between_classes() -> None:
    """Two examples with equal features and different labels: the first class wins, like in scikit-learn."""
    examples = torch.eye(4, dtype=torch.float64).repeat(2, 1)
    labels = torch.tensor([3, 1, 2, 0, 1, 1, 0, 2])
    test = torch.eye(4, dtype=torch.float64)
    result = vote(examples, labels, test, 4, k=2).argmax(dim=1)
    assert result.tolist() == [1, 1, 0, 0]
    assert result.tolist() == reference(2, examples, labels).predict(test.numpy()).tolist()


def test_ties_between_examples() -> None:
    examples = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 2, 2, 2])
    test = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert vote(examples, labels, test, 3, k=1).argmax(dim=1).tolist() == [1, 0]
    votes = vote(examples, labels, test, 3, k=2)
    assert votes[0, 1] == votes[0, 2] > votes[0, 0] == 0


def test_a_zero_vector() -> None:
    assert vote(torch.zeros(3, 2), torch.tensor([0, 1, 1]), torch.zeros(1, 2), 2, k=3).argmax().item() == 1


@pytest.mark.parametrize("k", [0, 4])
def test_more_neighbours_than_examples(k: int) -> None:
    with pytest.raises(ConfigError, match=f"k is {k}; it should be from 1 to 3, the number of examples"):
        vote(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), torch.zeros(1, 2), 1, k=k)
