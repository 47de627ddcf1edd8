"""`jaxfuse.freeze`: a function with some of its arguments bound for good."""

import functools
import inspect
import numbers
import operator
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfuse.frozen import artefact, calibration
from jaxfuse.frozen.constants import bind
from jaxfuse.frozen.int8 import Choice, Int8Site, Layers
from jaxfuse.frozen.leaves import as_array, is_array, type_of, unshared
from jaxfuse.frozen.module import of_module
from jaxfuse.frozen.packing import Filter, Packed
from jaxfuse.frozen.program import Freed, Program
from jaxfuse.fuse import fuse, inline
from jaxfuse.ops.errors import OpError, check_callable
from jaxfuse.program.signature import as_a_program_of_its_own, is_part_of_a_program, trace
from jaxfuse.runtime import near, platforms, private

PLAIN = (private.ARRAY, np.ndarray)  # classes of arrays that have values
FREED = ("jaxfuse.freeze: a weight is not there any more: its only use was to be folded into a layer, and these arguments need it in "
         "another way. Freeze the function again, and call it with these arguments first")


class Made(NamedTuple):
    """The program for one signature: as it is, `plain(constants, arrays)`; fused, with packed filters, `whole(constants, arrays)`; and
    that jitted, with its constants, `run(arrays)`."""

    program: Program
    plain: Callable[[list, list], Any]
    layers: Layers
    fused: Packed
    whole: Callable[[list, list], Any]
    run: Callable[[list], Any]


class Frozen:
    """A function whose bound arguments are constants. It is called, jitted, vmapped and differentiated like any other.

    A program is made at the first call with arguments of new shapes or dtypes; programs share their constants. What is not an array
    among the arguments, such as a bool, is part of the signature.
    """

    is_inference = True  # `jaxfuse.explain` judges its sites so too

    def __init__(self, fn: Callable, bound: tuple, positions: tuple[int, ...], policy: str):
        self.__name__ = "frozen"
        functools.update_wrapper(self, fn, updated=())
        self._sign(fn, positions)
        self._fn, self._positions, self._policy = fn, positions, policy
        self._leaves, self._tree = jax.tree.flatten(bound)
        self._leaves = list(map(unshared, self._leaves))
        self._types = list(map(type_of, self._leaves))
        self._made: dict[Any, Made] = {}
        self._called: dict[Any, Made] = {}  # the same for arguments that are arrays with values, found without making their types
        self._layers: Callable[[tuple], Layers] = functools.partial(Choice, policy, None, 0)
        self._constants: dict[str, jax.Array] = {}
        self._packed: dict[str, Filter] = {}  # by the names of the constants in whose place they stand
        self._closed_over: dict[int, tuple] = {}  # by its id an array, which stays alive, and what is read in its place
        self._has_int8 = False
        self._lock = threading.RLock()

    def __call__(self, *args, **kwargs):
        if is_part_of_a_program() and not self._has_int8:  # it is to be fused as a whole
            return self.in_floats(*args, **kwargs)
        made, arrays = self._of(args, kwargs)
        return made.run(arrays)

    def __repr__(self):
        return f"<jaxfuse.freeze of {self.__name__}, {len(self._made)} programs, {self.nbytes / 1e6:.1f} MB of constants>"

    def __deepcopy__(self, memo: dict | None = None) -> "Frozen":
        """Itself: it does not change."""
        return self

    __copy__ = __deepcopy__

    def __reduce__(self):
        raise TypeError(f"jaxfuse.freeze: {self!r} cannot be pickled; write it to a file, frozen.save(path, *args), and read that by "
                        "jaxfuse.load")

    @property
    def nbytes(self) -> int:
        """Bytes of the constants that its programs need, once for all of them."""
        return sum(array.size * array.dtype.itemsize for array in self._constants.values())

    def in_floats(self, *args, **kwargs):
        """The function as it is, neither fused nor in int8: what `jaxfuse.explain` explains."""
        made, arrays = self._of(args, kwargs)
        return made.plain([self._plain(name) for name in made.program.constants], arrays)

    def packed_layers(self, *args, **kwargs) -> set[tuple]:
        """For each layer with a packed weight, in the program for these arguments: (shape, dtype) of what it reads and of its weight. Our
        own loops compute these layers, and `jaxfuse.explain` says so."""
        made, _ = self._of(args, kwargs)
        return made.fused.layers

    def int8_sites(self, *args, **kwargs) -> list[Int8Site]:
        """The layers with constant weights in the program for these arguments: which are int8, the error of each, and why the others
        are not. Empty unless int8 was asked for."""
        made, _ = self._of(args, kwargs)
        lines = made.program.sources
        return [site._replace(source=lines[name][use]) if use < len(lines.get(name, ())) else site
                for (_, name, use), site in made.layers.sites.items()]

    def folds(self, *args, **kwargs) -> list[str]:
        """Which layers took a normalisation or a scale into their weights, in the program for these arguments: a line for each."""
        made, _ = self._of(args, kwargs)
        return [f"{fold.node.primitive} {fold.w!r} took in {' and '.join(fold.chain.affine_steps)} at {fold.node.source()}"
                for fold in made.program.folds.values()]

    def save(self, path: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Writes the function, for arguments of these types, to a file that `jaxfuse.load` reads without the code that made it.

        Args:
          path: the file, by custom with the ending ".jaxfuse".
          args, kwargs: arguments, or `jax.ShapeDtypeStruct`s. Their sizes may be symbolic (`jax.export.symbolic_shape("b")`): then the
            file is for any batch.

        Raises: what `jax.export` raises for a program that it does not export, ArtefactError for an argument that is no array and
        that no file can tell from another, FileNotFoundError for a folder that is not there, and what else `open` raises.
        """
        if wrong := near.no_folder(Path(path)):  # said before the work, which may take a while
            raise FileNotFoundError(f"Frozen.save: {wrong}")
        made, _ = self._of(args, kwargs)

        def run(constants, args, kwargs):
            return made.whole(constants, jax.tree.leaves((args, kwargs)))

        artefact.save(run, self._given(made.fused), path, self.__name__, args, kwargs)

    def _sign(self, fn: Callable, positions: tuple[int, ...]) -> None:
        """`inspect.signature` shows the arguments that are left, by which `jax.jit` finds those that are named to it."""
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):  # it has none that can be read
            return
        parameters = list(signature.parameters.values())
        left = [p for i, p in enumerate(parameters) if i not in positions or p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.__signature__ = signature.replace(parameters=left)

    def _unshared(self, array):
        """The copy that was made of it at first, where its owner may write to it."""
        return self._closed_over.setdefault(id(array), (array, unshared(array)))[1]

    def _given(self, fused: Packed) -> list[jax.Array]:
        return [self._constants[name] for name in fused.names]

    def _plain(self, name: str) -> jax.Array:
        """A constant of this name, unpacked if it is packed."""
        if name in self._constants:
            return self._constants[name]
        filter_ = self._packed[name]
        with jax.ensure_compile_time_eval():
            return filter_.unpacked(self._constants[filter_.names[0]])

    def _of(self, args: tuple, kwargs: dict) -> tuple[Made, list]:
        quick = None
        flat = not kwargs and all([type(arg) in PLAIN for arg in args])  # then there is no tree: each step here runs from cold caches
        leaves, tree = (list(args), None) if flat else jax.tree.flatten((args, kwargs))
        if flat or all([type(leaf) in PLAIN for leaf in leaves]):
            given = [(a.shape, a.dtype, getattr(a, "weak_type", False), getattr(a, "sharding", None)) for a in leaves]
            quick = private.trace_context(), tree, *given
            if made := self._called.get(quick):
                return made, leaves
        if tree is None:
            leaves, tree = jax.tree.flatten((args, kwargs))
        leaves = list(map(as_array, leaves))
        types = [type_of(leaf) if is_array(leaf) else (type(leaf), leaf) for leaf in leaves]
        signature = private.trace_context(), tree, *types
        with self._lock:
            if signature not in self._made:
                args, kwargs = jax.tree.unflatten(tree, leaves)
                self._made[signature] = self._make(args, kwargs, flags=tuple(t for t in types if not is_array(t)))
            made = self._made[signature]
            if quick:
                self._called[quick] = made
        return made, [leaf for leaf in leaves if is_array(leaf)]

    def _make(self, args: tuple, kwargs: dict, flags: tuple) -> Made:
        def whole(bound, args, kwargs):
            args = list(args)
            for position, value in zip(self._positions, bound):
                if position > len(args):
                    raise TypeError(f"{len(args)} positional arguments, and the one at position {position} is bound: "
                                    "give those before it by position")
                args.insert(position, value)
            return self._fn(*args, **kwargs)

        types = jax.tree.unflatten(self._tree, self._types)
        try:
            traced = trace(whole, (types, *jax.tree.map(type_of, (args, kwargs))), {})
        except (TypeError, ValueError) as error:
            bound = ", ".join(map(str, self._positions))
            if private.jit_options(self._fn).keys() & {"static_argnums", "static_argnames"}:
                error.add_note("jaxfuse: numbers among the arguments are traced; freeze functools.partial(fn, name=number), fn without jit")
            elif isinstance(error, TypeError):
                error.add_note(f"jaxfuse: a call gives the arguments that are not bound; bound are those at {bound}" if bound else
                               "jaxfuse: nothing is bound; freeze(fn, variables) binds the first argument")
            raise
        _require_arrays(traced.closed.consts)
        consts = list(map(self._unshared, traced.closed.consts))
        program = Program(traced.closed, len(self._arrays()), self._unshared)

        def plain(constants, arrays):
            return jax.tree.unflatten(traced.out_tree, program(constants, arrays))

        functools.update_wrapper(plain, self._fn, updated=())
        with as_a_program_of_its_own():
            run_fused, layers = inline(program, policy=self._policy, inference=True), self._layers(flags)
            fused = Packed(run_fused, program.constants, *program.types, layers, self._packed)
        self._keep(program, fused, [*consts, *self._arrays()])

        def run(constants, arrays):
            return jax.tree.unflatten(traced.out_tree, fused(constants, arrays))

        functools.update_wrapper(run, self._fn, updated=())
        return Made(program, plain, layers, fused, run, bind(run, self._given(fused)))

    def _calibrate(self, given: Any, allowed: float) -> None:
        """Runs the examples in floats, which stay for arguments that need them."""
        runs: list[calibration.Run] = []
        self._layers = Layers
        for i, args in enumerate(calibration.examples(given)):
            try:
                made, arrays = self._of(args, {})
            except Exception as error:  # of whatever kind the user's function or its framework raises
                raise OpError(f"jaxfuse.freeze: example {i} of int8 does not fit the function's arguments: {error}") from error
            runs.append(calibration.Run(made.fused, made.layers, self._given(made.fused), arrays))
        measured = calibration.calibrated(runs) if platforms.current() == "cpu" else {}  # the only one with a kernel
        self._layers = functools.partial(Choice, self._policy, measured, allowed)
        self._has_int8 = True
        self._made.clear()
        self._called.clear()

    def _arrays(self) -> list:
        """The bound arrays; None in the place of those that are folded away."""
        return [leaf for leaf, type_ in zip(self._leaves, self._types) if is_array(type_)]

    def _keep(self, program: Program, fused: Packed, given: Sequence) -> None:
        """Computes the constants that are new, packs filters, and lets go of weights that nothing needs any more."""
        wanted = {name for name in fused.plain_names if name not in self._constants}
        wanted |= {filter_.name for filter_ in fused.filters if not set(filter_.names) <= self._constants.keys()}
        here = wanted & (self._packed.keys() | self._constants.keys())  # to be packed in another way
        try:
            found = program.values(given, wanted - here)
        except Freed:
            raise OpError(FREED) from None
        found |= {name: self._plain(name) for name in here}
        for filter_ in fused.filters:
            if filter_.name in found:
                self._constants |= zip(filter_.names, filter_.packed(found[filter_.name]))
            if isinstance(filter_, Filter):
                self._packed[filter_.name] = filter_
        self._constants |= {name: found[name] for name in wanted if name in fused.plain_names}
        first = len(given) - len(self._arrays())
        places = [i for i, type_ in enumerate(self._types) if is_array(type_)]
        for i in program.spent:
            if i >= first:
                self._leaves[places[i - first]] = None


def freeze(fn: Callable, *bound: Any, argnums: int | Sequence[int] = 0, policy: str = "measured", int8: Iterable | None = None,
           int8_error: float = 0.05) -> Frozen:
    """`fn` with some of its arguments constant, for inference: `freeze(model.apply, variables)(x)` is `model.apply(variables, x)`.

    What depends on the constants alone is computed once. A normalisation or a scale that follows a convolution or a dense layer, with
    constants for each feature, becomes part of the weights, in float64. Casts of weights are done once. The rest is fused as by `fuse`.

    Args:
      fn: a function of arrays: `apply` of a Flax linen module, a Haiku or a plain function. A Flax nnx module in eval mode, or an
        Equinox module in inference mode, binds its own arrays, and so does what a function closes over: `freeze(model)`.
      bound: the arguments that are bound, any pytrees. They may be freed after the first call: large weights that were folded or cast
        are not kept. They may not be donated to another function: `freeze(fn, jax.tree.map(jnp.copy, variables))`.
      argnums: the positions of `bound` among fn's arguments; by default the first.
      policy: as of `fuse`; of int8 too.
      int8: examples of the other arguments, representative ones: tuples of them, or where there is one argument the argument. With
        them convolutions and dense layers are computed in int8, each by the range of numbers that it reads in the examples. With
        other flags (arguments that are no arrays) than an example has, they stay in floats.
      int8_error: how large the relative root mean square error of a layer's output in int8 may be, on the examples; layers with a
        larger one stay in floats.

    Returns: a function of the other arguments. `jaxfuse.explain` of it shows its sites; `folds(*args)` what was folded, and
    `int8_sites(*args)` which layers are int8.

    Raises: TypeError where fn is neither a function nor a module; OpError, a ValueError, for an unknown policy, for positions and for
    examples that do not fit or are not finite, for weights that are being traced (here), and for arguments that need a weight which was
    folded away in another way (when called).
    """
    positions = tuple(map(operator.index, argnums)) if isinstance(argnums, Sequence) else (operator.index(argnums),)
    check_callable(fn, "freeze", "a function or a module", "give model.apply, not what it returns")
    if not bound:
        if positions != (0,):
            raise OpError(f"jaxfuse.freeze: argnums is {argnums!r}, and nothing is bound; give the arguments at these positions too")
        fn, bound, positions = of_module(fn)
    elif len(positions) != len(bound) or sorted(set(positions)) != list(positions) or positions[0] < 0:
        raise OpError(f"jaxfuse.freeze: argnums is {argnums!r}, expected {len(bound)} positions in ascending order, one for each bound "
                      "argument; give argnums=")
    _require_arrays(jax.tree.leaves(bound))
    fuse(fn, policy=policy)  # for its checks of both
    if not (isinstance(int8_error, numbers.Real) and int8_error > 0):
        raise OpError(f"jaxfuse.freeze: int8_error is {int8_error!r}, expected a positive number; give a share such as 0.05")
    frozen = Frozen(fn, bound, positions, policy)
    if int8 is not None:
        frozen._calibrate(int8, int8_error)
    return frozen


def _require_arrays(constants: Iterable) -> None:
    """Raises OpError where a program is being traced of which these are values: they are not known yet."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in constants):
        raise OpError("jaxfuse.freeze: weights are being traced, by jit, grad or vmap, and have no values yet; call freeze outside, or "
                      "use jaxfuse.fuse inside")
