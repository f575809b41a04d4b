from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from lattn_compile.errors import UnsupportedError
from lattn_compile.ops import dispatch
from tests.ops.cases import OPS


def test_ops_are_registered_and_run_where_triton_transformers_and_fla_are_absent() -> None:
    script = """
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("triton", "transformers", "fla"):
                    raise ModuleNotFoundError(f"No module named {name!r}")

        sys.meta_path.insert(0, Absent())
        import torch
        import lattn_compile.ops

        assert not [m for m in sys.modules if m.startswith("lattn_compile.kernels")], "kernels load when called"
        assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules, "import stays cheap"
        x = torch.ones(1, 3, 1, 4)
        o, s = torch.ops.lattn.chunk(x, x, x, *(None,) * 7, scale=1.0)
        o, s, c = torch.ops.lattn.decode(x, x, x, *(None,) * 7, scale=1.0, write="token", state_format="int8")
        print(tuple(o.shape), tuple(s.shape), tuple(c.shape))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "(1, 3, 1, 4) (1, 1, 4, 4) (0,)"


@pytest.mark.parametrize("op", ["chunk", "decode"])
def test_the_schema_is_the_contract(op: str) -> None:
    schema = OPS[op]._schema
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    assert positional == [
        "q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "prefix_lengths", "sequence_lengths", "cursor",
        "position", "sequence_ids",
    ]  # fmt: skip
    interval = {"chunk": "chunk_size", "decode": "checkpoint_every"}[op]
    keywords = [
        "rule",
        "scale",
        "qk_l2norm",
        "write",
        "state_format",
        "readout",
        interval,
        "implementation",
        "site_id",
        "growth",
        "rounding",
        "seed",
        "feedback",
        "rotation",
        "gate",
        "prefill_operands",
        "prefill_inverse",
        "prefill_residual",
        "prefill_gradient",
    ]
    assert [a.name for a in schema.arguments if a.kwarg_only] == keywords
    assert not schema.is_mutable


def test_off_cuda_the_automatic_choice_is_the_reference_and_triton_says_why_not() -> None:
    for form in ("chunk", "decode", "replay"):
        work = dispatch.Work(torch.device("cpu"), torch.float32, 8, 8, None)
        assert dispatch.choose(form, "auto", work) == dispatch.choose(form, "reference", work) == "reference"
        assert dispatch.load(form, "auto", work).__name__ == f"lattn_compile.kernels.reference.{form}"
        with pytest.raises(UnsupportedError, match=r"implementation: got 'triton', but .*; want 'auto' or 'reference'"):
            dispatch.choose(form, "triton", work)


@pytest.mark.parametrize("op", ["chunk", "decode"])
def test_ops_survive_export_save_and_load(op: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from tests.ops.cases import inputs, options

    class Layer(torch.nn.Module):
        def forward(self, *x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            write = {"chunk": "chunk", "decode": "token"}[op]
            return OPS[op](*x, None, torch.tensor(3), None, None, **options(op, write, readout="after_write"))[:2]

    tensors = tuple(inputs(dtype=torch.float32))
    tokens = torch.export.Dim("tokens", min=2, max=64)
    dynamic = ({1: tokens},) * 5 + (None,)
    program = torch.export.export(Layer(), tensors, dynamic_shapes=(dynamic,))
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    longer = tuple(inputs(tokens=33, dtype=torch.float32))
    for a, b in zip(loaded(*longer), Layer()(*longer), strict=True):
        assert torch.equal(a, b)
