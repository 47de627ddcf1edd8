"""Trains the digit network; `fuse` is the only difference between the runs."""

import json
import time
from typing import NamedTuple

import jax
import numpy as np
import optax

import jaxfuse
from jaxfuse.commands.demo.digits import Digits, batches, load
from jaxfuse.commands.demo.network import DigitNet, random_variables

BATCH = 32
LEARNING_RATE = 1e-2
MODEL = DigitNet()


class Trained(NamedTuple):
    losses: np.ndarray  # float [steps]
    ms: float  # median of a step's time, compilation not counted
    accuracy: float  # on the test images


def loss_fn(params, batch_stats, images, labels):
    """(loss, new batch statistics)."""
    variables = {"params": params, "batch_stats": batch_stats}
    logits, updates = MODEL.apply(variables, images, train=True, mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, updates["batch_stats"]


def example(digits: Digits):
    """Arguments of `loss_fn`: the variables that training starts from and the first batch."""
    images, labels = next(batches(digits, BATCH, 1))
    variables = random_variables(MODEL, images)
    return variables["params"], variables["batch_stats"], images, labels


class Trainer:
    """A compiled train step and test. `fuse` is applied to the loss, under `value_and_grad`, and to the network for the test."""

    def __init__(self, fuse, digits: Digits, steps: int):
        self.digits, self.steps = digits, steps
        self.optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
        gradient = jax.value_and_grad(fuse(loss_fn), has_aux=True)

        def step(params, batch_stats, moments, images, labels):
            (loss, batch_stats), grads = gradient(params, batch_stats, images, labels)
            updates, moments = self.optimizer.update(grads, moments)
            return optax.apply_updates(params, updates), batch_stats, moments, loss

        self.params, self.batch_stats, images, labels = example(digits)
        start = self.params, self.batch_stats, self.optimizer.init(self.params)
        variables = {"params": self.params, "batch_stats": self.batch_stats}
        self.step = jax.jit(step).lower(*start, images, labels).compile()
        self.test = jax.jit(fuse(MODEL.apply)).lower(variables, digits.test_images).compile()

    def train(self, tell, nudge: bool = False) -> Trained:
        """Trains, telling `tell(loss, steps done)`. nudge: from kernels, each one rounding error larger."""
        losses, seconds, variables = self.run(jax.tree.map(_next_larger, self.params) if nudge else self.params, tell)
        logits = self.test(variables, self.digits.test_images)
        accuracy = float(np.mean(np.argmax(logits, axis=-1) == self.digits.test_labels))
        return Trained(np.array(losses), 1e3 * float(np.median(seconds)), accuracy)

    def run(self, params, tell=lambda loss, done: None) -> tuple[list[float], list[float], dict]:
        """Trains from these parameters: the losses, the seconds of each step, and the variables in the end."""
        state = params, self.batch_stats, self.optimizer.init(params)
        losses, seconds = [], []
        for images, labels in batches(self.digits, BATCH, self.steps):
            start = time.perf_counter()
            *state, loss = jax.block_until_ready(self.step(*state, images, labels))
            seconds.append(time.perf_counter() - start)
            losses.append(float(loss))
            tell(losses[-1], len(losses))
        return losses, seconds, {"params": state[0], "batch_stats": state[1]}


def print_milliseconds(size: int, steps: int) -> None:
    """Of a step, unfused and fused, as JSON: for a process that does nothing else."""
    digits = load(size)
    trainers = [Trainer(fuse, digits, steps) for fuse in (lambda function: function, jaxfuse.fuse)]
    print(json.dumps([trainer.train(lambda loss, done: None).ms for trainer in trainers]))


def _next_larger(weights: np.ndarray) -> np.ndarray:
    return np.nextafter(weights, np.float32(np.inf))
