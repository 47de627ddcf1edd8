"""The snippets of README.md and of docs/ run as they stand, one after the other, in a namespace like a user's."""

import pathlib
import re
import types

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx

import jaxfuse.flax.linen
import jaxfuse.flax.nnx

ROOT = pathlib.Path(__file__).parent.parent
X, W = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 3))
ANY = dict(jaxfuse=jaxfuse, fn=lambda x: jax.nn.relu(x), args=(X,), train_step=lambda w: jax.grad(jnp.sum)(w), x=X, w=W,
           bias=jnp.ones(3), residual=X)


PAGES = {str(path.relative_to(ROOT)): re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
         for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def test_pages_with_snippets_are_found():
    assert {"README.md", "docs/flax.md", "docs/guide.md"} <= {page for page, snippets in PAGES.items() if snippets}


@pytest.mark.parametrize("page", [page for page, snippets in PAGES.items() if snippets])
def test_snippets(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the files that they write
    module = types.ModuleType("snippets")
    namespace = vars(module) | ANY | {"model": nnx.Conv(3, 3, (3, 3), rngs=nnx.Rngs(0))}
    for snippet in PAGES[page]:
        exec(compile(snippet, page, "exec"), namespace)
    for name, arguments in (("Block", [True]), ("Head", [])):
        if name in namespace:
            layer = namespace[name]()
            assert isinstance(layer, nn.Module) and layer.init_with_output(jax.random.key(0), X, *arguments)[0].shape[:3] == X.shape[:3]
