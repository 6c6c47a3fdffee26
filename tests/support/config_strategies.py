"""Random valid configs of tiny models, for property tests."""

from typing import Any

from hypothesis import strategies as st

from vitrail.models.config import ViTConfig

rates = st.sampled_from([0.0, 0.3])


@st.composite
def configs(draw: st.DrawFn, /, **fixed: Any) -> ViTConfig:
    """Draw a valid config: each choice depends on the ones before."""
    fields: dict[str, Any] = {}

    def choose(name: str, options: list[Any]) -> Any:
        fields[name] = fixed[name] if name in fixed else draw(st.sampled_from(options))
        return fields[name]

    stem = choose("stem", ["linear", "conv", "linear_norm", "conv_stem", "resnet"])
    match stem:
        case "resnet":
            depths = draw(st.sampled_from([(), (1,), (1, 1)]))
            fields["resnet"] = {
                "depths": depths,
                "width_factor": 0.5,
                "numerics": draw(st.sampled_from(["google", "timm"])),
            }
            stride = 4 * 2 ** max(0, len(depths) - 1)
            h, w = stride * draw(st.integers(1, 2)), stride * draw(st.integers(1, 2))
        case "conv_stem":
            h = w = draw(st.sampled_from([2, 4]))
        case _:
            h, w = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    fields["patch_size"], fields["image_size"] = (h, w), (h * rows, w * columns)
    choose("channels", [1, 3, 4, 13])

    choose("heads", [1, 2, 3])
    choose("width", [12, 24])
    choose("head_dim", [None, 4, 8])
    choose("depth", [1, 2])
    choose("mlp_width", [None, 10])
    choose("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu"])
    choose("norm_order", ["pre", "post"])
    for switch in ("norm_before_blocks", "qkv_bias", "qk_norm", "proj_bias", "patch_bias", "mlp_bias"):
        choose(switch, [False, True])
    inner = fields["heads"] * (fields["head_dim"] or fields["width"] // fields["heads"])
    choose("out_proj", [True, False] if inner == fields["width"] else [True])
    choose("layer_scale", [None, 0.1])
    choose("norm_eps", [1e-6, 1e-5])

    token = choose("class_token", ["first", "last", "none"])
    choose("registers", [0, 1, 3])
    pools = ["mean", "map", "none", "patches"]
    pool = choose("pool", pools if token == "none" else ["cls", *pools])
    layers = [(), (-1,), tuple(range(fields["depth"]))] if pool == "patches" else [()]
    several = len(choose("head_layers", layers)) > 1
    choose("distillation_token", [False, True] if pool == "cls" else [False])
    choose("pool_over", ["patches", "all"] if pool in ("mean", "map") else ["patches"])
    choose("final_norm", ["before_pool", "after_pool", "none"])
    choose("representation", [None] if several else [None, 6])
    choose("classes", [0, 5])

    head = fields["head_dim"] or fields["width"] // fields["heads"]
    turning = ["rope_2d"] if head % 4 == 0 else []
    position = choose("position", ["none", "learned_1d", "learned_2d", "relative", "sincos_2d", *turning])
    added = position in ("learned_1d", "learned_2d", "sincos_2d")
    choose("position_at", ["stem", "every_block", "shared"] if added else ["stem"])
    choose("position_covers", [None, "patches", "class", "all"] if position == "learned_1d" else [None, "patches"])

    for rate in (
        "embed_dropout",
        "attention_dropout",
        "proj_dropout",
        "mlp_dropout",
        "stochastic_depth",
        "patch_dropout",
    ):
        fields[rate] = fixed.get(rate, draw(rates))
    if pool == "patches":
        fields["patch_dropout"] = 0.0
    choose("init", ["paper", "timm", "torchvision", "lucidrains"])
    choose("head_bias", [None, -10.0])
    return ViTConfig(**fields)
