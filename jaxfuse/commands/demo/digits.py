"""Real images that need no download: scikit-learn's handwritten digits."""

from typing import NamedTuple

import jax
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Digits(NamedTuple):
    """Images float32 [n, size, size, 1] in 0..1, labels int [n]."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(size: int = 32) -> Digits:
    """The 1797 digits of 8×8, scaled up to size×size; a fifth of each kind kept for the test."""
    small, labels = load_digits(return_X_y=True)
    images = small.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    images = np.asarray(jax.image.resize(images, (len(images), size, size, 1), "linear"))
    train_images, test_images, train_labels, test_labels = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    return Digits(train_images, train_labels, test_images, test_labels)


def batches(digits: Digits, size: int, steps: int):
    """Yields (images, labels) of `steps` batches, every epoch in another order; the same ones in every run."""
    random = np.random.default_rng(0)
    order = np.empty(0, int)
    for _ in range(steps):
        if len(order) < size:
            order = random.permutation(len(digits.train_labels))
        chosen, order = order[:size], order[size:]
        yield digits.train_images[chosen], digits.train_labels[chosen]
