"""Where a layer of a frozen network is faster in int8 than in float32, and how large its weights may be."""

import math

from jaxfuse.ops.conv import int8
from jaxfuse.runtime import ffi

# For each way of summing products of bytes, as `form` names them, the products from which on int8 was measured to be faster.
# Of ResNet-50's and BERT's 25 layers two are faster with AVX2 (Zen 1: 0.8 to 3.4 times as long), and all with AVX512-VNNI (Emerald Rapids:
# 0.18 to 0.78; the smallest has 2,048,000 products).
SMALLEST: dict[str, float] = {"avx2": math.inf, "avx512_vnni": 2_000_000}


def form() -> str:
    """How the native module sums products of bytes here: "portable", "avx2", "avx512", or with "_vnni" by one instruction; "": it is
    not built."""
    module = ffi.native()
    return module.info().get("int8", "") if module else ""


def most() -> int:
    """The largest weight in int8."""
    return int8.WHOLE if form().endswith("vnni") else int8.SMALL


def expects_no_gain(products: int) -> str:
    """Why a layer of so many products is not expected to be faster."""
    if not form():
        return "the native module has no int8"
    if form() not in SMALLEST:
        return f'int8 was not measured on a CPU like this one ({form()}); policy="always" takes it all the same'
    smallest = SMALLEST[form()]
    if smallest == math.inf:
        return f"int8 was measured to be slower for most layers on a CPU like this one ({form()})"
    return f"too small to gain: {products} products, measured faster from {smallest}" if products < smallest else ""
