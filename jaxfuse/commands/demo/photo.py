"""ResNet-50 on a real photograph, random weights."""

import time
from typing import NamedTuple

import jax
import numpy as np
from sklearn.datasets import load_sample_image

import jaxfuse
from jaxfuse.commands.demo.network import ResNet50, random_variables

NAME = "china.jpg"
MODEL = ResNet50()
PIXEL_MEAN, PIXEL_STD = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32)  # of ImageNet


class Inference(NamedTuple):
    logits: np.ndarray
    ms: float  # median, compilation not counted


def load(size: int = 224) -> np.ndarray:
    """float32 [1, size, size, 3]: the middle square of the photograph, normalised."""
    photo = load_sample_image(NAME)
    height, width, _ = photo.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = photo[top : top + side, left : left + side].astype(np.float32) / 255
    image = np.asarray(jax.image.resize(square, (size, size, 3), "linear"))
    return ((image - PIXEL_MEAN) / PIXEL_STD)[None]


def variables(image: np.ndarray):
    # spread: every scale, bias and statistic away from 0 and 1, so that an error in any of them would show
    return random_variables(MODEL, image, spread=0.2)


def infer(fuse, image: np.ndarray, weights, repetitions: int) -> Inference:
    compiled = jax.jit(fuse(MODEL.apply)).lower(weights, image).compile()
    seconds = []
    logits = jax.block_until_ready(compiled(weights, image))
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(compiled(weights, image))
        seconds.append(time.perf_counter() - start)
    return Inference(np.asarray(logits), 1e3 * float(np.median(seconds)))


def sites(image: np.ndarray, weights) -> jaxfuse.FusionReport:
    return jaxfuse.explain(MODEL.apply, weights, image)
