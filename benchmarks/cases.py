"""The named cases: data only, so that every peer, in whatever interpreter, reads the same table."""

from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches

from . import issues


@dataclass(frozen=True)
class Conv:
    """activation(conv(x, w) + bias), channels last, padded so that stride 1 keeps the size: of a square image or, if causal, of a
    sequence, which is padded in front. A transposed one makes it `stride` times as large."""

    title: str
    kernel: int
    inputs: int
    outputs: int
    size: int
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    causal: bool = False
    transposed: bool = False
    activation: str = "relu"

    @property
    def dimensions(self):
        return 1 if self.causal else 2

    @property
    def padding(self):
        """In front and behind, the same in every dimension."""
        reach = self.kernel if self.transposed else self.dilation * (self.kernel - 1)
        return (reach, 0) if self.causal else (reach // 2, reach // 2)

    @property
    def output_size(self):
        if self.transposed:
            return self.size * self.stride
        return (self.size - 1) // self.stride + 1


@dataclass(frozen=True)
class BatchNorm:
    """activation(batch norm in training (x) [+ residual]) on a square NHWC image."""

    title: str
    channels: int
    size: int
    residual: bool = True
    activation: str = "relu"


@dataclass(frozen=True)
class Dense:
    """activation(x · w + bias [+ residual]) of `size` tokens in each item of the batch; "gelu" is the exact one."""

    title: str
    inputs: int
    outputs: int
    activation: str = "none"
    residual: bool = False
    size: int = 128


@dataclass(frozen=True)
class Norm:
    """A "layer", "rms" or "group" norm (32 groups) over the channels of tokens or of a square image, its scale and shift in
    float32."""

    title: str
    norm: str
    channels: int
    size: int
    dimensions: int
    activation: str = "none"


@dataclass(frozen=True)
class Recurrent:
    """A sequence of `size` steps, time first, through an "lstm" or "gru" cell with as many inputs as hidden units."""

    title: str
    cell: str
    hidden: int
    size: int = 64


@dataclass(frozen=True)
class Transformer:
    """An encoder layer as BERT has it, norms last, of `size` tokens; without `inner` features the attention alone, which takes
    queries, keys and values."""

    title: str
    features: int
    heads: int
    inner: int = 0
    size: int = 128


@dataclass(frozen=True)
class Optimizer:
    """An update of all a network's parameters, written over the old ones: "momentum" or "adamw", both with weight decay."""

    title: str
    rule: str
    network: str
    small: bool = False


@dataclass(frozen=True)
class Model:
    """A network of `parameters` numbers with 1000 classes: of square RGB images, or of `size` tokens if it has a vocabulary."""

    title: str
    network: str
    parameters: int
    size: int = 224
    vocabulary: int = 0


@dataclass(frozen=True)
class Issue:
    """A slow program that a user reported; `issues.py` has what it computes on, `issues_jax.py` and `issues_torch.py` how."""

    title: str
    small: bool = False


CONVS = {
    "conv3x3_c64_s56": Conv("3×3, 64, 56²", 3, 64, 64, 56),
    "conv3x3_c256_s14": Conv("3×3, 256, 14²", 3, 256, 256, 14),
    "conv1x1_c256_c64_s56": Conv("1×1, 256→64, 56²", 1, 256, 64, 56),
    "conv1x1_c64_c256_s56": Conv("1×1, 64→256, 56²", 1, 64, 256, 56),
    "conv7x7_stride2_c3_c64_s224": Conv("7×7 stride 2, 3→64, 224²", 7, 3, 64, 224, stride=2),
    "conv3x3_stride2_c128_s56": Conv("3×3 stride 2, 128, 56²", 3, 128, 128, 56, stride=2),
    "conv3x3_dilation2_c256_s28": Conv("3×3 dilation 2, 256, 28²", 3, 256, 256, 28, dilation=2),
    "conv3x3_groups32_c256_s28": Conv("3×3 groups 32, 256, 28²", 3, 256, 256, 28, groups=32),
    "depthwise3x3_c192_s28": Conv("depthwise 3×3, 192, 28²", 3, 192, 192, 28, groups=192),
    "depthwise3x3_stride2_c144_s56": Conv("depthwise 3×3 stride 2, 144, 56²", 3, 144, 144, 56, stride=2, groups=144),
    "depthwise3x3_dilation2_c256_s28": Conv("depthwise 3×3 dilation 2, 256, 28²", 3, 256, 256, 28, dilation=2, groups=256),
    "depthwise5x5_c240_s28": Conv("depthwise 5×5, 240, 28²", 5, 240, 240, 28, groups=240),
    "depthwise7x7_c384_s14": Conv("depthwise 7×7, 384, 14²", 7, 384, 384, 14, groups=384),
    "depthwise4_causal_c1024_s1024": Conv("depthwise 4, causal, 1024, 1024", 4, 1024, 1024, 1024, groups=1024, causal=True),
    "depthwise7x7_c96_s56": Conv("depthwise 7×7, 96, 56²", 7, 96, 96, 56, groups=96),
    "conv3x3_silu_c64_s56": Conv("3×3 + silu, 64, 56²", 3, 64, 64, 56, activation="silu"),
    "transposed4x4_stride2_c128_c64_s28": Conv("transposed 4×4 stride 2, 128→64, 28²", 4, 128, 64, 28, stride=2, transposed=True),
}
BATCH_NORMS = {
    "bn_add_relu_c256_s56": BatchNorm("bn+add+relu, 256, 56²", 256, 56),
    "bn_add_relu_c512_s28": BatchNorm("bn+add+relu, 512, 28²", 512, 28),
    "bn_add_relu_c1024_s14": BatchNorm("bn+add+relu, 1024, 14²", 1024, 14),
    "bn_add_relu_c2048_s7": BatchNorm("bn+add+relu, 2048, 7²", 2048, 7),
    "bn_relu_c64_s112": BatchNorm("bn+relu, 64, 112²", 64, 112, residual=False),
    "bn_silu_c64_s56": BatchNorm("bn+silu, 64, 56²", 64, 56, residual=False, activation="silu"),
}
DENSE = {
    "dense_c768_c3072_gelu": Dense("dense+gelu, 768→3072, 128 tokens", 768, 3072, "gelu"),
    "dense_c3072_c768_residual": Dense("dense+residual, 3072→768, 128 tokens", 3072, 768, residual=True),
    "dense_c768_c768": Dense("dense, 768→768, 128 tokens", 768, 768),
}
NORMS = {
    "layer_norm_c768": Norm("layer norm, 768, 128 tokens", "layer", 768, 128, 1),
    "layer_norm_c96_s56": Norm("layer norm, 96, 56²", "layer", 96, 56, 2),
    "rms_norm_c768": Norm("RMS norm, 768, 128 tokens", "rms", 768, 128, 1),
    "group_norm_silu_c96_s56": Norm("group norm + silu, 96, 56²", "group", 96, 56, 2, "silu"),
}
RECURRENT = {
    f"{cell}_h{hidden}": Recurrent(f"{cell.upper()}, {hidden} hidden, 64 steps", cell, hidden)
    for cell in ("lstm", "gru")
    for hidden in (28, 512, 1024)
}
TRANSFORMERS = {
    "attention_h12_c768": Transformer("attention, 12 heads of 64, 128 tokens", 768, 12),
    "bert_layer_c768": Transformer("BERT-base layer, 128 tokens", 768, 12, 3072),
}
OPTIMIZERS = {
    "momentum_resnet50": Optimizer("SGD with momentum, ResNet-50's parameters", "momentum", "resnet50"),
    "adamw_resnet50": Optimizer("AdamW, ResNet-50's parameters", "adamw", "resnet50"),
}
MODELS = {
    "resnet50": Model("ResNet-50", "resnet50", 25_557_032),
    "mobilenet_v2": Model("MobileNetV2", "mobilenet_v2", 3_504_872),
    "efficientnet_b0": Model("EfficientNet-B0", "efficientnet_b0", 5_288_548),
    "convnext_tiny": Model("ConvNeXt-Tiny", "convnext_tiny", 28_589_128),
    "vit_s16": Model("ViT-S/16", "vit_s16", 22_050_664),
    "bert_base": Model("BERT-base, 128 tokens", "bert_base", 110_249_704, size=128, vocabulary=30522),
}
TRAINED = ("resnet50", "mobilenet_v2", "convnext_tiny", "vit_s16")
# Stages: expansion, features, blocks, stride of the first.
MOBILENET_V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
# The same, and the size of the depthwise filters.
EFFICIENTNET_B0 = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))
# Titles as in the trackers of jax-ml/jax and openxla/xla. (name, task, dtype)
ISSUES = {
    ("jax#23713", "forward", "f32"): "Depthwise convolution in `flax.nnx.Conv` is significantly slower than PyTorch and TensorFlow",
    ("jax#13800", "gradient", "f32"): "Slow conv_general_dilated backward pass for feature_group_count !=1",
    ("jax#26266", "forward", "f32"): "Grouped convolutions are much slower than standard convolutions when increasing kernel dilation",
    ("jax#12868", "forward", "f32"): "Convolution is significantly slower inside a loop body (CPU)",
    ("jax#23783", "forward", "f32"): "Slow transpose convolutions (both cpu and cuda backends)",
    ("jax#31662", "gradient", "bf16"): "Performance Issue with ConvTranpose3D (32x slower than Torch)",
    ("xla#34273", "gradient", "bf16"): "Massive performance issue on Convolution with JAX",
    ("jax#1606", "gradient", "f32"): "very slow compile: CNN, per sample gradient",
    ("jax#13111", "gradient", "f32"): "Add support for RNNs using library calls",
}
KINDS = {
    "model": Model,
    "batch_norm": BatchNorm,
    "conv": Conv,
    "dense": Dense,
    "norm": Norm,
    "recurrent": Recurrent,
    "transformer": Transformer,
    "optimizer": Optimizer,
    "issue": Issue,
}
# Of the kinds with a forward and a gradient case: (shapes, batches).
LAYERS = {
    "batch_norm": (BATCH_NORMS, (8,)),
    "conv": (CONVS, (1, 8)),
    "dense": (DENSE, (1, 8)),
    "norm": (NORMS, (8,)),
    "recurrent": (RECURRENT, (8,)),
    "transformer": (TRANSFORMERS, (8,)),
}


@dataclass(frozen=True)
class Case:
    """task: "forward"; "gradient" (forward, and the gradients of every input for a given cotangent); "inference";
    "training" (one step); "update" (of an optimizer)."""

    name: str
    kind: str
    task: str
    dtype: str
    batch: int
    shape: Conv | BatchNorm | Dense | Norm | Recurrent | Transformer | Optimizer | Model | Issue

    def to_json(self):
        return asdict(self)

    @staticmethod
    def from_json(data):
        return Case(**{**data, "shape": KINDS[data["kind"]](**data["shape"])})


def _table():
    for name, shape in MODELS.items():
        for task, batches in (("inference", (1, 8)), ("training", (8,) if name in TRAINED else ())):
            for batch in batches:
                for dtype in ("f32", "bf16"):
                    yield Case(f"{name}.b{batch}.{dtype}.{task}", "model", task, dtype, batch, shape)
    for kind, (shapes, batches) in LAYERS.items():
        for name, shape in shapes.items():
            for batch in batches:
                for dtype in ("f32", "bf16"):
                    for task in ("forward", "gradient"):
                        yield Case(f"{name}.b{batch}.{dtype}.{task}", kind, task, dtype, batch, shape)
    for name, shape in OPTIMIZERS.items():
        yield Case(f"{name}.f32.update", "optimizer", "update", "f32", 1, shape)
    for (name, task, dtype), title in ISSUES.items():
        yield Case(name, "issue", task, dtype, issues.sizes(name)["batch"], Issue(f"{name}: {title}"))


CASES = tuple(_table())


def select(names):
    """Cases that some of `names` selects; a name is a kind ("conv"), or dotted parts of a case's name in any order
    ("resnet50.bf16")."""
    chosen = set()
    for name in names:
        found = {case for case in CASES if name == case.kind or set(name.split(".")) <= set(case.name.split("."))}
        if not found:
            words = sorted({part for case in CASES for part in (case.kind, *case.name.split("."))})
            near = [match for part in name.split(".") for match in get_close_matches(part, words, 2, 0.5)]
            advice = f"near it: {', '.join(near)}" if near else "--list shows the names"
            raise ValueError(f"benchmarks: no case is named {name!r}; {advice}")
        chosen |= found
    return [case for case in CASES if not names or case in chosen]


def quick(case):
    """The case made small, to try the machinery: a result of it says nothing about speed."""
    if case.kind == "issue":
        return replace(case, batch=issues.sizes(case.name, True)["batch"], shape=replace(case.shape, small=True))
    if case.kind == "optimizer":
        return replace(case, shape=replace(case.shape, small=True))
    size = min(case.shape.size, 64 if case.kind == "model" else 28)
    return replace(case, batch=min(case.batch, 2), shape=replace(case.shape, size=size))
