# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""How other projects call what InfViT has too."""

import re
from collections.abc import Collection, Iterable, Mapping

# Names under which whole models are wrapped, or hold their transformer.
WRAPPERS = frozenset({'module', 'model', 'backbone', 'vit', 'deit', 'dinov2'})

# timm, DeiT, DINO and DINOv2 (whose blocks may come in chunks), torchvision,
# mmsegmentation and mmpretrain, Hugging Face's transformers, and the
# reference package of InfSA.
_LAYER = re.compile(
    r'(?:encoder\.)?(?:blocks|layers|layer)\.'
    r'(?:\d+\.(?=\d+\.))?(?:encoder_layer_)?(\d+)\.(.+)'
)

_IN_LAYER = {
    'attn.norm': ('norm1', 'ln1', 'ln_1', 'layernorm_before'),
    'ffn.norm': ('norm2', 'ln2', 'ln_2', 'layernorm_after'),
    'attn.op.qkv': ('attn.qkv',),
    'attn.op.q_proj': (
        *('attn.q_proj', 'self_attention.q_proj'),
        'attention.attention.query',
    ),
    'attn.op.k_proj': (
        *('attn.k_proj', 'self_attention.k_proj'),
        'attention.attention.key',
    ),
    'attn.op.v_proj': (
        *('attn.v_proj', 'self_attention.v_proj'),
        'attention.attention.value',
    ),
    'attn.op.out_proj': (
        *('attn.proj', 'attn.out_proj', 'attn.attn.out_proj'),
        *('self_attention.out_proj', 'attention.output.dense'),
    ),
    'ffn.op.fc1': (
        *('mlp.fc1', 'mlp.0', 'mlp.linear_1', 'ffn.layers.0.0', 'ff.0'),
        'intermediate.dense',
    ),
    'ffn.op.fc2': (
        *('mlp.fc2', 'mlp.3', 'mlp.linear_2', 'ffn.layers.1', 'ff.3'),
        'output.dense',
    ),
}
_ALONE_IN_LAYER = {
    'attn.op.qkv.weight': (
        *('attn.attn.in_proj_weight', 'self_attention.in_proj_weight'),
    ),
    'attn.op.qkv.bias': (
        *('attn.attn.in_proj_bias', 'self_attention.in_proj_bias'),
    ),
    'attn.op.rho_logit': ('attn.rho_logit', 'self_attention.rho_logit'),
    # Scales of a branch, which its last projection can take up.
    'attn.op.out_proj.scale': (
        *('ls1.gamma', 'gamma_1', 'attn.gamma1.weight'),
        'layer_scale1.lambda1',
    ),
    'ffn.op.fc2.scale': (
        *('ls2.gamma', 'gamma_2', 'ffn.gamma2.weight', 'layer_scale2.lambda1'),
    ),
}
_OUTSIDE = {
    'patch_embed.projection': (
        *('patch_embed.proj', 'patch_embed.projection', 'patch_embed'),
        *('conv_proj', 'embeddings.patch_embeddings.projection'),
    ),
    'norm': ('norm', 'ln1', 'encoder.ln', 'encoder.norm', 'layernorm'),
}
POSITIONS = (
    *('pos_embed', 'encoder.pos_embedding', 'embeddings.position_embeddings'),
)
_TOKENS = {
    'class': ('cls_token', 'class_token', 'embeddings.cls_token'),
    'distillation': ('dist_token', 'embeddings.distillation_token'),
    'register': ('reg_token', 'register_tokens', 'embeddings.register_tokens'),
}
# Patterns of entries of transformers that InfViT cannot be.
REFUSED = {
    'relative positions': r'relative_position|rel_pos',
    'rotary positions': r'(^|[._])rope|rotary|periods$',
    'registers': r'(^|\.)(reg_token|register_tokens)$',
    'normalised queries and keys': r'attn\.(q_norm|k_norm)\.',
    'a gated MLP': r'mlp\.(w12|w3|fc1_g|fc1_x|weights_in)\.',
    'a normalisation before the layers': (
        r'^(norm_pre|pre_norm|pre_ln|ln_pre|patch_embed\.norm)\.'
    ),
    'a convolutional stem': r'^(conv_proj\.conv|patch_embed\.backbone)',
}


def _by_name(table: Mapping[str, Iterable[str]], parts: bool) -> dict:
    """A table from their names to ours, of modules or of single entries."""
    endings = ('.weight', '.bias') if parts else ('',)
    return {
        theirs + end: ours + end
        for ours, names in table.items()
        for theirs in names
        for end in endings
    }


_LAYER_NAMES = _by_name(_IN_LAYER, True) | _by_name(_ALONE_IN_LAYER, False)
_OUTSIDE_NAMES = _by_name(_OUTSIDE, True)
TOKENS = _by_name(_TOKENS, False)


def find_prefix(entries: Collection[str]) -> str:
    """The wrapper names under which most entries are known.

    Args:
        entries (Collection[str]): Names of a state dict.

    Raises:
        ValueError: None is known under any.
    """
    prefixes = {''}
    for name in entries:
        prefix = ''
        for part in name.split('.')[:-1]:
            if part not in WRAPPERS:
                break
            prefix += part + '.'
            prefixes.add(prefix)
    counts = {
        prefix: sum(
            _is_known(name.removeprefix(prefix))
            for name in entries
            if name.startswith(prefix)
        )
        for prefix in sorted(prefixes, key=len)
    }
    best = max(counts, key=lambda prefix: counts[prefix])
    if not counts[best]:
        some = ', '.join(list(entries)[:3]) or 'nothing'
        raise ValueError(
            'nothing in it is known of a Vision Transformer of timm, '
            'torchvision, mmsegmentation, mmpretrain, DINOv2, transformers '
            f'or infsa; it has {some}'
        )
    return best


def _is_known(name: str) -> bool:
    match = _LAYER.fullmatch(name)
    if match is not None:
        return match[2] in _LAYER_NAMES
    return name in _OUTSIDE_NAMES or name in POSITIONS or name in TOKENS


def our_name(name: str) -> str | None:
    """InfViT's name of an entry; None outside the layers if there is none.

    What is packed or multiplied into others there still has a name of its
    own: ``qkv``, and ``scale`` for layer scale.

    Raises:
        ValueError: A layer of InfViT has no such thing.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return _OUTSIDE_NAMES.get(name)
    index, rest = match.groups()
    if rest not in _LAYER_NAMES:
        raise ValueError(
            f'has {name} in a layer, which InfViT lacks; the weights would '
            'compute something else'
        )
    return f'layers.{int(index)}.{_LAYER_NAMES[rest]}'
