"""Networks, written once and small; each is a plain `nn.Module` with children `trunk`, `head`."""

from polyfed.models.cnn import conv_net
from polyfed.models.mlp import mlp

__all__ = ["conv_net", "mlp"]
