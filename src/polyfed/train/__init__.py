"""Training of one node: the loop, evaluation, rollback."""

from polyfed.train.evaluate import accuracy, mean_loss, outputs
from polyfed.train.loop import Fitted, fit
from polyfed.train.rollback import keep_best, roll_back

__all__ = ["Fitted", "accuracy", "fit", "keep_best", "mean_loss", "outputs", "roll_back"]
