"""The area under the ROC curve beside scikit-learn's, and by hand."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from polyfed.maths.ranking import area_under_roc
from polyfed.random import stream


@pytest.mark.parametrize("steps", [0, 4], ids=["no ties", "ties"])
def test_the_area_is_that_of_the_curve(steps: int) -> None:
    draw = stream(0, "ranking")
    scores, positive = torch.randn(60, generator=draw), torch.rand(60, generator=draw) < 0.2
    scores = (scores * steps).round() if steps else scores
    want = roc_auc_score(positive, scores)
    assert area_under_roc(scores, positive) == pytest.approx(want)
    assert area_under_roc(-scores, positive) == pytest.approx(1 - want)


def test_equal_scores_are_half_an_area() -> None:
    assert area_under_roc(torch.zeros(5), torch.tensor([True, False, False, True, False])) == 0.5
