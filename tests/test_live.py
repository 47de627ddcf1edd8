"""Who reads a value once what is fused is gone, and matches that wait for each other."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfuse
from jaxfuse import patterns
from jaxfuse.program.graph import Emission, Graph
from jaxfuse.program.liveness import circular, dead_after
from jaxfuse.program.site import Match


def two_sums(x):
    return x + 1, x * 2


def emissions(first, second):
    """Each computes its value, and pretends to need the other's."""
    return [Emission((first.producer.inputs[0], other), (value,), lambda read, value=value, made=made: [(value, made(read))])
            for value, other, made in ((first, second, lambda read: read(first.producer.inputs[0]) + 1),
                                       (second, first, lambda read: read(second.producer.inputs[0]) * 2))]


def test_a_circle_is_found_and_a_line_is_not():
    graph = Graph(jax.make_jaxpr(two_sums)(1.0))
    first, second = graph.outputs
    one, other = emissions(first, second)
    assert set(circular(graph, {first: one, second: other})) == {one, other}
    assert circular(graph, {first: one}) == []


def test_one_of_two_matches_that_wait_for_each_other_is_taken_back(monkeypatch):
    class Waiting:
        @staticmethod
        def anchors(graph):
            return graph.nodes[:1]

        @staticmethod
        def match(graph, node, claimed, measured):
            for emission in emissions(*graph.outputs):
                yield Match("waiting", emission.defines[0].producer, (), (emission,), (), 0)

    monkeypatch.setattr(patterns, "ORDER", (Waiting,))
    report = jaxfuse.explain(two_sums, jnp.ones(3), policy="always")
    assert len(report.fused) == 1 and "computed from what it gives" in report.skipped[0].reason
    for made, expected in zip(jaxfuse.fuse(two_sums, policy="always")(jnp.ones(3)), two_sums(jnp.ones(3))):
        np.testing.assert_array_equal(made, expected)


def test_what_only_a_replaced_value_needed_is_gone():
    graph = Graph(jax.make_jaxpr(lambda x: (jnp.sin(x) * 2, jnp.cos(x) * 3))(1.0))
    sine = graph.outputs[0].producer.inputs[0].producer
    assert set(dead_after(graph, graph.outputs[:1])) == {sine.index, graph.outputs[0].producer.index}
    assert set(dead_after(graph, graph.outputs[:1], live=sine.out)) == {graph.outputs[0].producer.index}
