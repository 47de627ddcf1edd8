"""Where a layer of a frozen network is faster in int8 than in float32, and how large its weights may be."""

from jaxfuse.runtime import ffi
from jaxfuse.tuning import tuned

# For each way of summing products of bytes, as `form` names them, the products from which on int8 was measured to be faster.
# Of ResNet-50's and BERT's 25 layers, of which the smallest has 2,048,000 products, all take less time with AMX (an Intel Xeon: 0.11 to
# 0.58), with AVX512-VNNI (Emerald Rapids: 0.18 to 0.78) and with AVX2 (Zen 3: 0.46 to 0.95). Where vectors are computed half by half
# (Zen 1) all but two take more, up to 3.4.
SMALLEST = {"avx2": 2_000_000, "avx512_vnni": 2_000_000, "avx512_amx": 2_000_000}


def form() -> str:
    """How the native module sums products of bytes here: "portable", "avx2", "avx512", or with "_vnni" by one instruction, or with
    "_amx" matrices of them; "": it is not built."""
    module = ffi.native()
    return module.info().get("int8", "") if module else ""


def narrow() -> bool:
    """Whether the processor adds products of bytes in 16 bits, which limits weights (ops/conv/int8.py)."""
    return not form().endswith(("vnni", "amx"))


def expects_no_gain(products: int) -> str:
    """Why a layer of so many products is not expected to be faster."""
    if not form():
        return "the native module has no int8"
    if form() not in SMALLEST:
        return f'int8 was not measured on a CPU like this one ({form()}); policy="always" takes it all the same'
    if form() == "avx2" and not tuned.computes_whole_vectors():
        return f"int8 was measured to be slower for most layers on a CPU like this one ({form()}, half by half)"
    smallest = SMALLEST[form()]
    return f"too small to gain: {products} products, measured faster from {smallest}" if products < smallest else ""
