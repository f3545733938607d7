"""What the Triton kernels need of a GPU, found without one: each compiled to a cubin, its registers and spills counted.

    python -m tests.kernels.compiled [--write]

Prints the figures as JSON; --write makes them the limits of `test_compiled.py`. It is a process of its own since the
tests have Triton interpret the kernels. The cases are those of a model of eight billion parameters in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # as it is until 3.10 changes the default

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gpu import decode_attention, prefill_attention, rms_norm, rotate_and_store, silu_and_mul

LIMITS = Path(__file__).with_suffix(".json")
CAPABILITIES = (80, 89, 90)
WARP_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel as it is launched.

    Attributes:
        types: of the arguments that are no constants; a pointer or a stride is a multiple of 16.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, object]
    options: Mapping[str, int] = field(default_factory=dict)


ATTENTION_TYPES = {
    **dict.fromkeys(("query_ptr", "k_ptr", "v_ptr", "output_ptr"), "*bf16"),
    **dict.fromkeys(("tables_ptr", "seq_lens_ptr"), "*i32"),
    **dict.fromkeys(("query_row_stride", "query_head_stride", "block_stride", "kv_head_stride", "table_stride"), "i32"),
    **dict.fromkeys(("scale_log2", "soft_cap_log2"), "fp32"),
}
HEAD = {"HEAD_DIM": 128, "D": 128}


def cases() -> Iterator[Case]:
    for name, constants in {
        "one query": {"NUM_QUERIES": 1, "M": 16, "WINDOW": 0, "HAS_SOFT_CAP": False},
        "four queries, window, soft cap": {"NUM_QUERIES": 4, "M": 32, "WINDOW": 4096, "HAS_SOFT_CAP": True},
    }.items():
        splits = {"SPLIT_SIZE": 0, "NUM_SPLITS": 8, "MIN_TILES": decode_attention.MIN_SPLIT_TILES}
        yield Case(
            name=f"decode_attention, {name}",
            kernel=decode_attention._decode_attention_kernel,
            types={**ATTENTION_TYPES, "partial_ptr": "*fp32", "lse_ptr": "*fp32"},
            constants={**constants, **splits, **HEAD, "GROUP": 8, "BLOCK_SIZE": 16, "N": decode_attention.TILE},
            options=decode_attention.OPTIONS,
        )
    yield Case(
        name="merge_splits",
        kernel=decode_attention._merge_splits_kernel,
        types={"partial_ptr": "*fp32", "lse_ptr": "*fp32", "seq_lens_ptr": "*i32", "output_ptr": "*bf16"},
        constants={**splits, **HEAD, "NUM_QUERIES": 1, "WINDOW": 0, "N": decode_attention.TILE, "S": 8},
    )
    for name, constants in {
        "causal": {"WINDOW": 0, "HAS_SOFT_CAP": False},
        "window, soft cap": {"WINDOW": 4096, "HAS_SOFT_CAP": True},
    }.items():
        yield Case(
            name=f"prefill_attention, {name}",
            kernel=prefill_attention._prefill_attention_kernel,
            types={**ATTENTION_TYPES, "cu_seqlens_ptr": "*i32", "num_seqs": "i32"},
            constants={
                **constants,
                **HEAD,
                "NUM_QUERIES": prefill_attention.ROWS // 4,
                "GROUP": 4,
                "BLOCK_SIZE": 16,
                "M": prefill_attention.ROWS,
                "N": prefill_attention.TILE,
            },
            options=prefill_attention.OPTIONS,
        )
    yield Case(
        name="rms_norm",
        kernel=rms_norm._rms_norm_kernel,
        types={
            **dict.fromkeys(("hidden_ptr", "weight_ptr", "output_ptr"), "*bf16"),
            "indices_ptr": "*i64",
            "row_stride": "i32",
            "eps": "fp32",
        },
        constants={"SIZE": 4096, "HAS_INDICES": True, "D": 4096},
        options={"num_warps": 8},
    )
    yield Case(
        name="silu_and_mul",
        kernel=silu_and_mul._silu_and_mul_kernel,
        types={"gate_up_ptr": "*bf16", "output_ptr": "*bf16", "row_stride": "i32", "size": "i32"},
        constants={"PIECE": silu_and_mul.PIECE},
    )
    yield Case(
        name="rotate_and_store",
        kernel=rotate_and_store._rotate_and_store_kernel,
        types={
            **dict.fromkeys(("rows_ptr", "query_norm_ptr", "key_norm_ptr", "k_ptr", "v_ptr"), "*bf16"),
            **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64"),
            **dict.fromkeys(("row_stride", "block_stride", "kv_head_stride"), "i32"),
            "cos_sin_ptr": "*fp32",
            "eps": "fp32",
        },
        constants={
            **HEAD,
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "ROTARY_DIM": 128,
            "BLOCK_SIZE": 16,
            "HAS_NORMS": True,
        },
        options={"num_warps": 1},
    )


def resources(case: Case, capability: int) -> dict[str, int]:
    """Registers a thread; bytes a thread spills; shared bytes of a program."""
    names = case.kernel.arg_names
    aligned = [name for name, type in case.types.items() if type.startswith("*") or name.endswith("stride")]
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, WARP_SIZE)
    compiled = triton.compile(source, target=target, options=dict(case.options))
    (program,) = Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump*")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        report = subprocess.run([program, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return {
        "registers": used["REG"],
        "spilled_bytes": used["STACK"] + used["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found = {case.name: {f"sm_{number}": resources(case, number) for number in CAPABILITIES} for case in cases()}
    text = json.dumps({"triton": triton.__version__, "kernels": found}, indent=1)
    print(text)
    if args.write:
        LIMITS.write_text(text + "\n")


if __name__ == "__main__":
    main()
