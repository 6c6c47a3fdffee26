"""Small models of other libraries, and the names of their tensors in ours."""

from typing import Any

from tests.support.peers import import_peer, scramble
from torch import nn

SMALL: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 3, "heads": 3, "classes": 7}
TORCHVISION = {
    r"class_token": "cls_token",
    r"encoder\.pos_embedding": "pos_embed",
    r"conv_proj\.conv_bn_relu_(\d+)\.0\.(.*)": r"patch_embed.backbone.\1.conv.\2",
    r"conv_proj\.conv_bn_relu_(\d+)\.1\.(.*)": r"patch_embed.backbone.\1.norm.\2",
    r"conv_proj\.(?:conv_last\.)?(weight|bias)": r"patch_embed.proj.\1",
    r"encoder\.layers\.encoder_layer_(\d+)\.ln_([12])\.(.*)": r"blocks.\1.norm\2.\3",
    r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_(.*)": r"blocks.\1.attn.qkv.\2",
    r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.(.*)": r"blocks.\1.attn.proj.\2",
    r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.0\.(.*)": r"blocks.\1.mlp.fc1.\2",
    r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.3\.(.*)": r"blocks.\1.mlp.fc2.\2",
    r"encoder\.ln\.(.*)": r"norm.\1",
    r"heads\.pre_logits\.(.*)": r"pre_logits.fc.\1",
    r"heads\.head\.(.*)": r"head.\1",
}
LUCIDRAINS = {
    r"cls_token": "cls_token",
    r"pos_embedding": "pos_embed",
    r"to_patch_embedding\.1\.(.*)": r"patch_embed.norm_in.\1",
    r"to_patch_embedding\.2\.(.*)": r"patch_embed.proj.\1",
    r"to_patch_embedding\.3\.(.*)": r"patch_embed.norm_out.\1",
    r"transformer\.layers\.(\d+)\.0\.norm\.(.*)": r"blocks.\1.norm1.\2",
    r"transformer\.layers\.(\d+)\.0\.to_qkv\.(.*)": r"blocks.\1.attn.qkv.\2",
    r"transformer\.layers\.(\d+)\.0\.to_out\.0\.(.*)": r"blocks.\1.attn.proj.\2",
    r"transformer\.layers\.(\d+)\.1\.net\.0\.(.*)": r"blocks.\1.norm2.\2",
    r"transformer\.layers\.(\d+)\.1\.net\.1\.(.*)": r"blocks.\1.mlp.fc1.\2",
    r"transformer\.layers\.(\d+)\.1\.net\.4\.(.*)": r"blocks.\1.mlp.fc2.\2",
    r"transformer\.norm\.(.*)": r"norm.\1",
    r"mlp_head\.(.*)": r"head.\1",
}
TRANSFORMERS = {
    r"vit\.embeddings\.cls_token": "cls_token",
    r"vit\.embeddings\.position_embeddings": "pos_embed",
    r"vit\.embeddings\.patch_embeddings\.projection\.(.*)": r"patch_embed.proj.\1",
    r"vit\.layers\.(\d+)\.attention\.([qkv])_proj\.(.*)": r"blocks.\1.attn.\2.\3",
    r"vit\.layers\.(\d+)\.attention\.o_proj\.(.*)": r"blocks.\1.attn.proj.\2",
    r"vit\.layers\.(\d+)\.layernorm_before\.(.*)": r"blocks.\1.norm1.\2",
    r"vit\.layers\.(\d+)\.layernorm_after\.(.*)": r"blocks.\1.norm2.\2",
    r"vit\.layers\.(\d+)\.mlp\.(fc[12])\.(.*)": r"blocks.\1.mlp.\2.\3",
    r"vit\.layernorm\.(.*)": r"norm.\1",
    r"classifier\.(.*)": r"head.\1",
}


def timm_vit(**options: Any) -> nn.Module:
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}
    import_peer("timm")
    return scramble(import_peer("timm.models.vision_transformer").VisionTransformer(**{**size, **options}))
