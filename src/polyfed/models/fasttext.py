r"""fastText's classifier: the mean of the words' embeddings, and a linear layer.

    trunk(x) = (1 / N) sum over the N tokens t of x that are not padding of E[t]                (1)
    Linear(width, classes)                                   = head

Joulin et al., EACL 2017, arXiv:1607.01759, Eq. (1).
Symbols: E = embedding, a row for each token; token 0 is padding.
Limits: a text without tokens is the zero vector.
Deviations from the paper: words only, no hashed n-grams; a full softmax, no hierarchical one.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

PADDING = 0


def fasttext(vocabulary: int, classes: int, *, width: int = 32) -> nn.Module:
    """The classifier of token sequences, padded with 0 to one length.

    Args:
        vocabulary: number of tokens, padding included.
        classes: number of outputs.
        width: of the embedding, which is the representation.
    """
    trunk, head = MeanEmbedding(vocabulary, width), nn.Linear(width, classes)
    return nn.Sequential(OrderedDict(trunk=trunk, head=head))


class MeanEmbedding(nn.Module):
    """Eq. (1): from token numbers (n, length) to vectors (n, width)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean embedding of each row."""
        vectors: Tensor = self.embedding(tokens)
        there = (tokens != PADDING).to(vectors.dtype).unsqueeze(-1)
        return (vectors * there).sum(1) / there.sum(1).clamp(min=1)
