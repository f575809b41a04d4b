"""The reason codes as a document, `docs/reasons.md`: meaning, an example and the way out."""

from __future__ import annotations

import textwrap

from lattn_compile.errors import REASONS

__all__ = ["EXAMPLES", "reasons_markdown"]

# The shortest code that ends in each reason; a code without one is explained by its text alone. Those of a spelled-out
# recurrence show one token: q, k [B, H, K]; v [B, H, V]; decay = exp(g) [B, H, 1, 1]; beta [B, H, 1]; S [B, H, K, V].
EXAMPLES: dict[str, str] = {
    "RULE_NONE": """\
lc.Recipe(rules=[("model.layers.0.*", None), ("*", lc.Policy())])   # layer 0 is left alone""",
    "NO_RULE": """\
lc.Recipe(rules=[("model.layers.*.linear_attn", lc.Policy())])      # says nothing about model.mtp.linear_attn""",
    "CALL_OPTIONS": """\
chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)        # context parallelism is not built""",
    "EXPLICIT_POLICY": """\
lc.linear_attention(q, k, v, g, beta, policy="int8")                # in the model, which a recipe compiles""",
    "DENSE_CACHE": """\
model.compile(backend="lattn_compile", options={"policy": lc.Policy(lc.Int8(), write=lc.Chunk(64))})
model.generate(input_ids)           # hands a dense state from call to call""",
    "STATE_DTYPE": """\
cache = torch.zeros(B, HV, K, V, dtype=torch.bfloat16)              # rounds the state at every hand-over
o, state = fused_recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=cache, output_final_state=True)
cache.copy_(state)                                                  # int8 would come on top of that""",
    "SHARED_REGION": """\
layer = torch.compiler.nested_compile_region(layer)                 # one graph for layers 0 and 1
lc.Recipe(rules=[("layers.0.*", "int8"), ("layers.1.*", "exact")])  # two policies""",
    "NOT_NORMALIZED": """\
with torch.inference_mode():        # inside the compiled function
    o, S = my_recurrence(q, k, v, g, beta, S)""",
    "AUTOCAST_REGION": """\
with torch.autocast("cpu", dtype=torch.bfloat16):
    o, S = my_recurrence(q, k, v, g, beta, S)""",
    "STATE_OP": """\
S = torch.tanh(decay * S + k[..., :, None] * v[..., None, :])""",
    "STATE_NONLINEAR": """\
S = decay * S * (1 - S) + k[..., :, None] * v[..., None, :]""",
    "STATE_MIXED": """\
S = S - 0.5 * S.mT + k[..., :, None] * v[..., None, :]              # of a square state""",
    "STATE_ROUNDED": """\
S = (decay * S + k[..., :, None] * v[..., None, :]).bfloat16().float()
S = decay * S + k2[..., :, None] * v2[..., None, :]                 # the next token: not rounded""",
    "ARITHMETIC_DTYPE": """\
S = (decay.bfloat16() * S.bfloat16() + k.bfloat16()[..., :, None] * v.bfloat16()[..., None, :]).float()""",
    "NOT_CARRIED": """\
W = 0.9 * S + k[..., :, None] * v[..., None, :]                     # read below, then forgotten
o = torch.einsum("bhkv,bhk->bhv", W, q)""",
    "NO_WRITE": """\
S = decay * S
S = S - k[..., :, None] * torch.einsum("bhkv,bhk->bhv", S, k)[..., None, :]""",
    "NOT_RANK_ONE": """\
S = S + W @ S + k[..., :, None] * v[..., None, :]                   # W [K, K], any matrix""",
    "KEYS_DIFFER": """\
S = decay * S
u = beta * (v - torch.einsum("bhkv,bhk->bhv", S, k.roll(1, -1)))    # reads along another key than it writes
S = S + k[..., :, None] * u[..., None, :]""",
    "BETA_ONE_SIDE": """\
S = decay * S
u = beta * v - torch.einsum("bhkv,bhk->bhv", S, k)
S = S + k[..., :, None] * u[..., None, :]""",
    "DECAY_ORDER": """\
u = beta * (v - torch.einsum("bhkv,bhk->bhv", S, k))                # reads the state that is not decayed yet
S = decay * S + k[..., :, None] * u[..., None, :]""",
    "DECAY_AXIS": """\
S = torch.sigmoid(v)[..., None, :] * S + k[..., :, None] * v[..., None, :]""",
    "DECAY_RANGE": """\
S = a[..., None, None] * S + k[..., :, None] * v[..., None, :]      # a [B, H], an input of the graph""",
    "READ_BEFORE_WRITE": """\
o = torch.einsum("bhkv,bhk->bhv", S, q)
S = decay * S + k[..., :, None] * v[..., None, :]""",
}

_HEAD = """\
# Reason codes

A recurrence that was found and left as it is, and a candidate that was not recognised, each carry one of these codes in
the report. `lattn-compile explain CODE` prints the same. A code is stable: scripts may test for it.

In the examples of spelled-out recurrences, one token is shown: `q`, `k` `[B, H, K]`; `v` `[B, H, V]`;
`decay = exp(g)` `[B, H, 1, 1]`; `beta` `[B, H, 1]`; the state `S` `[B, H, K, V]`.

<!-- Written by `python docs/write_reasons.py` from lattn_compile/errors.py and the examples in
     lattn_compile/render/reasons.py: change those. -->
"""


def reasons_markdown() -> str:
    """All of `errors.REASONS`, a section a code."""
    parts = [_HEAD, _filled(" · ".join(f"[{code}](#{code.lower()})" for code in REASONS)) + "\n"]
    for code, reason in REASONS.items():
        example = f"```python\n{EXAMPLES[code]}\n```\n\n" if code in EXAMPLES else ""
        text = reason.text[:1].upper() + reason.text[1:]
        parts.append(f"## {code}\n\n{_filled(text)}.\n\n{example}{_filled(f'**What to do.** {reason.remedy}')}\n")
    return "\n".join(parts)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
