r"""Secure sums: whole numbers modulo 2^64, hidden by masks that cancel in the sum.

    y_i = x_i + sum_{j != i} sign(i, j) PRG(k_ij)  mod 2^64,      sum_i y_i = sum_i x_i   (1)
    k_ij = HKDF(X25519(secret_i, public_j)) = k_ji,  sign(i, j) = -sign(j, i)             (2)
    x = round(2^32 w v)                            fixed point of a weighted number       (3)

Bonawitz et al. CCS 2017, section 4 (masking with one-time pads), without its secret sharing: who is
in a sum is known before anybody masks, and a sum that lacks one of them is not used.
Symbols: v = a number, w = weight of a node, PRG = ChaCha20's key stream, sign by the order of the
public keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.errors import ConfigError, MessageError

KEY = 32  # bytes of a key
_ONE = 2.0**32
_ROOM = 2.0**62
Words = NDArray[np.uint64]


def to_fixed(v: Tensor, weight: int) -> Tensor:
    """Apply Eq. (3)."""
    return (v.double() * (weight * _ONE)).round().to(torch.int64)


def from_fixed(total: Tensor, weight: int, dtype: torch.dtype) -> Tensor:
    """The mean from a sum of Eq. (3) and the sum of weights; whole numbers are rounded."""
    mean = total.double() / (weight * _ONE)
    return (mean if dtype.is_floating_point else mean.round()).to(dtype)


def fits(v: Tensor, weight: int, parties: int) -> bool:
    """Whether a sum of so many such numbers stays inside the ring; NaN and infinity do not."""
    largest = v.abs().max().double() if v.numel() else torch.tensor(0.0)
    return bool(largest * (weight * parties) < _ROOM / _ONE)


def add(parts: Sequence[Tensor]) -> Tensor:
    """The sum modulo 2^64 of int64 tensors.

    >>> add([torch.tensor([2**63 - 1, 1]), torch.tensor([3, 1])]) - torch.tensor([-(2**63), 0])
    tensor([2, 2])
    """
    total = np.zeros(tuple(parts[0].shape), np.uint64)
    for part in parts:
        total = total + part.cpu().numpy().view(np.uint64)
    return torch.from_numpy(np.asarray(total).view(np.int64)).to(parts[0].device)


def masked(x: Tensor, secret: bytes, keys: Sequence[bytes], about: bytes) -> Tensor:
    """Apply Eq. (1) to a vector.

    Args:
        x: whole numbers, int64, one axis.
        secret: the node's own secret key.
        keys: the public keys of all, its own too.
        about: what the sum is about: part of what keys are derived from.
    """
    own = public_of(secret)
    total = x.cpu().numpy().view(np.uint64)
    for key in keys:
        if key != own:
            mask = _stream(_shared(secret, key, about), len(x))
            total = total + mask if own < key else total - mask
    return torch.from_numpy(total.view(np.int64)).to(x.device)


def new_secret() -> bytes:
    """A new secret key, from the operating system's randomness."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(secret: bytes) -> bytes:
    """The public key that belongs to a secret one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def check_masks() -> None:
    """Raise unless what keys are made with is installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ConfigError("guard: secure needs: pip install 'polyfed[privacy]'.") from error


def _shared(secret: bytes, key: bytes, about: bytes) -> bytes:
    """Apply Eq. (2)."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        agreed = X25519PrivateKey.from_private_bytes(secret).exchange(
            X25519PublicKey.from_public_bytes(key)
        )
    except ValueError as error:  # a point that makes every agreement the same
        raise MessageError(f"a public key that is none: {error}") from error
    return HKDF(SHA256(), KEY, salt=None, info=b"polyfed masks " + about).derive(agreed)


def _stream(key: bytes, length: int) -> Words:
    """So many words of ChaCha20's key stream; a key is used once, so the nonce may be zero."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    pad = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * length))
    return np.frombuffer(pad, dtype="<u8").astype(np.uint64)
