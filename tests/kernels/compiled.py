"""What the Triton kernels need of a GPU, found without one: each compiled to code, its registers and spills counted.

    python -m tests.kernels.compiled [--write] [NAME ...]

Prints the figures of the cases whose names begin with a NAME as JSON; --write makes them the limits of
`test_compiled.py`. It is a process of its own since the tests have Triton interpret the kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # as it is until 3.10 changes the default

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from tests.kernels.compile_cases import attention, blocks, linear, lora_matmul, moe, quantized, rows, sample
from tests.kernels.compile_cases.case import Case

GROUPS = (attention, rows, blocks, linear, quantized, moe, lora_matmul, sample)

LIMITS = Path(__file__).with_suffix(".json")
NVIDIA = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 89, 90)}
TARGETS = {**NVIDIA, **({"gfx942": GPUTarget("hip", "gfx942", 64)} if "amd" in backends else {})}


def cases() -> Iterator[Case]:
    return itertools.chain.from_iterable(group.cases() for group in GROUPS)


def resources(case: Case, target: GPUTarget) -> dict[str, int]:
    """Registers a thread; bytes a thread spills; shared bytes of a program."""
    names = case.kernel.arg_names
    aligned = [name for name, type in case.types.items() if _is_aligned(case, name, type)]
    constants = {**case.constants, **(case.amd_constants if target.backend == "hip" else {})}
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {**case.options, **(case.amd_options if target.backend == "hip" else {})}
    compiled = triton.compile(source, target=target, options=options)
    registers, spilled = (_of_amdgcn if target.backend == "hip" else _of_cubin)(compiled)
    return {"registers": registers, "spilled_bytes": spilled, "shared_bytes": compiled.metadata.shared}


def _is_aligned(case: Case, name: str, type: str) -> bool:
    return type.startswith("*") or name.endswith("stride") or name in case.aligned


def _of_cubin(compiled: CompiledKernel) -> tuple[int, int]:
    (program,) = Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump*")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        report = subprocess.run([program, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def _of_amdgcn(compiled: CompiledKernel) -> tuple[int, int]:
    used = {
        name: int(count)
        for name, count in re.findall(
            r"\.(vgpr_count|agpr_count|private_segment_fixed_size): +(\d+)", compiled.asm["amdgcn"]
        )
    }
    return used["vgpr_count"] + used.get("agpr_count", 0), used["private_segment_fixed_size"]


def figures(case: Case) -> dict[str, dict[str, int]]:
    """Those of every GPU that the case is for."""
    return {name: resources(case, target) for name, target in TARGETS.items() if name not in case.not_on}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    wanted = [case for case in cases() if not args.names or case.name.startswith(tuple(args.names))]
    found = {case.name: figures(case) for case in wanted}
    print(json.dumps({"triton": triton.__version__, "kernels": found}, indent=1))
    if args.write:
        known = json.loads(LIMITS.read_text())["kernels"] if args.names else {}
        limits = {case.name: (known | found)[case.name] for case in cases() if case.name in known | found}
        LIMITS.write_text(json.dumps({"triton": triton.__version__, "kernels": limits}, indent=1) + "\n")


if __name__ == "__main__":
    main()
