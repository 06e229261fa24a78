#!/usr/bin/env python3
"""Checks the machine code (SASS) of our kernels for Hopper, as shown by cuobjdump, and each kernel's use of a multiprocessor.

    test/sass.py --compiler VERSION [--write] OBJECT     OBJECT was compiled by nvcc VERSION for sm_90a (and others)

Fixed rules: no kernel keeps more than two registers in local memory; in attention's loops over tiles nothing is computed
element by element behind branches, ALiBi's term is computed only for models that use it, and exponentials that overlap products
are before the wait for them; attention by mma.sync has the products of one tile, none twice; kernels bound by memory load all
arrays 16 bytes at a time. Each kernel's numbers are compared with the table in dev/kernels/resources.md (--write updates it), so
that every change is visible in a commit. Registers depend on the compiler, so numbers are compared only for the table's
compiler.
make test-sass compiles, gets cuobjdump where it is missing, and runs this; so does make test where cuobjdump is there.
Prints `ok: NAME` or `FAILED: NAME` per check.
"""
import argparse
import os
import re
import subprocess
import sys

TABLE = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../dev/kernels/resources.md")
STACK_BYTES = 8  # two registers
RESERVED_BYTES = 1024  # of a block's shared memory, reserved by the system; included in SHARED
SHARED_BYTES = 227 * 1024  # per block, static and dynamic, without the reserved part
BRANCHES = 12  # in a loop over tiles: waits, masks as a whole, the loop itself. A branch per element makes it about 100

# Attention's loops over tiles on Hopper: exponentials and products of each iteration, and whether the last wait is after
# all exponentials. dk, dv multiply these before that wait, so there it cannot be. The last template argument: with caps and
# dropout, where tanh takes another exponential, and dq has a second copy of the loop body for tiles without a mask.
LOOPS = {
    "hopper::attention_forward_kernel<128, false>": (66, 16, True),  # 64 x 128 scores of 128 threads, 2 rescales
    "hopper::attention_forward_kernel<128, true>": (66 + 64, 16, True),
    "hopper::attention_forward_kernel<64, false>": (66, 12, True),
    "hopper::attention_forward_kernel<64, true>": (66 + 64, 12, True),
    "hopper::attention_backward_queries_kernel<128, false>": (64, 24, True),
    "hopper::attention_backward_queries_kernel<128, true>": (3 * 64, 24, True),
    "hopper::attention_backward_queries_kernel<64, false>": (64, 16, True),
    "hopper::attention_backward_queries_kernel<64, true>": (3 * 64, 16, True),
    "hopper::attention_backward_keys_kernel<128, false, false>": (32, 24, False),
    "hopper::attention_backward_keys_kernel<128, false, true>": (2 * 32, 24, False),
    "hopper::attention_backward_keys_kernel<64, false, false>": (32, 16, False),
    "hopper::attention_backward_keys_kernel<64, false, true>": (2 * 32, 16, False),
    "hopper::attention_backward_keys_kernel<128, true, false>": (32, 32, False),  # dq too: 64 x 64 scores, five products
    "hopper::attention_backward_keys_kernel<64, true, false>": (64, 32, False),  # 64 x 128
}
# The ladder's matrix product (dev/kernels/gemm_hopper.cuh): its code and its loop over K have the products of one step of
# 64, one fence before and one wait after them, and no GPU-wide fence.
PRODUCTS = {"HGMMA": 64 // 16, "WARPGROUP.ARRIVE": 1, "WARPGROUP.DEPBAR": 1, r"MEMBAR\S*GPU": 0}
# The products of experts (grouped_product.cuh): their loop has the products, the loads of fragments and the copies of one step of 32
# k for a warp's 64 x 64 numbers, and one barrier.
GROUPED = {"HMMA": 4 * 8 * 2, "LDSM": (4 + 4) * 2, "LDGSTS": 8, "BAR": 1}
# Attention by mma.sync (attention_mma.cuh): by head size a tile's M (times 16 rows) and N columns. Its code has one tile's products
# of 16 x 8 x 16, for all heads: scores and output forward; scores, the weights' gradient and dq; and of scores, the weights'
# gradient, dk and dv those that the last two template arguments ask for.
MMA_TILES = {
    "mma::attention_forward": lambda size: (2 if size <= 96 else 1, 64 if size == 128 else 32),
    "mma::attention_backward_queries": lambda size: (2 if size <= 80 else 1, 16 if size == 256 else 32),
    "mma::attention_backward_keys": lambda size: (1, 16 if size in (160, 256) else 32),
}
HEAD_SIZES = (32, 64, 80, 96, 128, 160, 192, 256)
# 16-byte loads of 8 elements by type, and 8-byte loads.
EIGHT = {"float": (2, 0), "bf16": (1, 0), "Float8<true, 27>": (0, 1), "Float8<false, 60>": (0, 1)}
# Loads of kernels bound by memory, for the types in their names: of 8 elements, except where noted.
LOADS = {
    r"adamw_kernel<TYPE, TYPE, TYPE>": (2, 0),  # the weights' halves; both moments, the gradient
    r"lion_kernel<TYPE, TYPE>": (2, 0),  # the weights' halves; the momentum, the gradient
    r"muon_momentum_kernel<TYPE, TYPE>": (0, 0),  # the momentum, the gradient
    r"average_kernel<.*>": (4, 0),  # the weights' halves, the average in fp32
    r"apply_update_kernel": (3, 0),  # the weights' halves, the update
    r"accumulate_kernel<false>": (2, 0),  # the summand in fp32
    r"accumulate_kernel<true>": (3, 0),  # and the sum in bf16
    r"attention_decode_kernel<true>": (9, 0),  # the query, four keys and values in flight
    r"dropout_kernel<true>": (1, 0),
    r"rows_kernel<true, Elementwise<Value<.*>>>": (2, 0),  # of 16 elements, as in the next three
    r"rows_kernel<true, Elementwise<Gradient<.*>>>": (4, 0),
    r"rows_kernel<true, Gated<.*>>": (4, 0),
    r"rows_kernel<true, GatedGradient<.*>>": (6, 0),
    r"expert_activation_kernel<true, PlainActivation<.*>>": (1, 0),
    r"expert_activation_kernel<true, GatedActivation<.*>>": (2, 0),
    r"expert_activation_backward_kernel<true, PlainActivation<.*>>": (2, 0),
    r"expert_activation_backward_kernel<true, GatedActivation<.*>>": (3, 0),
}
# Columns of the table, with the allowed difference from it.
COLUMNS = {
    **{"registers": 4, "setmaxnreg": 0, "stack": 0, "static shared": 0, "dynamic shared, at most": 0},
    **{"HGMMA": 0, "HMMA": 0, "LDG.128": 0},
}
LOOP_COLUMNS = {"instructions": 40, "always issued": 40, "HGMMA": 0, "MUFU.EX2": 0, "after the last wait": 0, "branches": 2}


def cuobjdump(option, obj):
    return subprocess.run(["cuobjdump", option, "-arch", "sm_90a", obj], check=True, capture_output=True, text=True).stdout


def readable(names):
    """Demangled names without our namespaces, results and parameters."""
    text = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True).stdout
    short = {}
    for mangled, name in zip(names, text.splitlines()):
        depth = 0
        for end, letter in enumerate(name):  # the parameters start at the first ( outside of <>
            depth += {"<": 1, ">": -1}.get(letter, 0)
            if letter == "(" and depth == 0:
                break
        name = re.sub(r"^void ", "", name[:end])
        short[mangled] = re.sub(r"> (?=>)", ">", re.sub(r"gpu::(detail::)?", "", name))
    return short


def resources(text):
    """By mangled name: registers, stack and shared memory."""
    return {
        name: tuple(map(int, numbers))
        for name, *numbers in re.findall(r"Function (\S+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    }


def code(text):
    """By mangled name: instructions as (address, text)."""
    functions = {}
    for line in text.splitlines():
        if m := re.match(r"\s+Function : (\S+)", line):
            instructions = functions.setdefault(m[1], [])
        elif m := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line):
            instructions.append((int(m[1], 16), m[2]))
    return functions


def count(instructions, pattern):
    """The number of instructions whose name, after a predicate, starts with a match."""
    return sum(bool(re.match(r"(@\S+ )?(%s)" % pattern, text)) for _, text in instructions)


def tile_loop(instructions):
    """The shortest loop with exponentials and at least two waits for products: from a branch's target to the branch."""
    best = None
    for last, (address, text) in enumerate(instructions):
        m = re.match(r"(@\S+ )?BRA\b.*\b(0x[0-9a-f]+)", text)
        if not m or int(m[2], 16) >= address:
            continue
        loop = [i for i in instructions[: last + 1] if i[0] >= int(m[2], 16)]
        if best and len(loop) >= len(best):
            continue
        if count(loop, "WARPGROUP.DEPBAR") >= 2 and count(loop, "MUFU.EX2") >= 16:
            best = loop
    return best


def always_issued(loop):
    """The loop without the blocks that a branch skips (masks, ALiBi), except blocks with products, which are a tile's work."""
    skipped = set()
    for address, text in loop:
        m = re.match(r"@\S+ BRA\b.*\b(0x[0-9a-f]+)", text)
        block = [i for i in loop if m and address < i[0] < int(m[1], 16) <= loop[-1][0]]
        if not count(block, "HGMMA"):
            skipped |= {i[0] for i in block}
    return [i for i in loop if i[0] not in skipped]


def product_loop(instructions, product):
    """The shortest loop with products."""
    loops = []
    for last, (address, text) in enumerate(instructions):
        m = re.match(r"(@\S+ )?BRA\b.*\b(0x[0-9a-f]+)", text)
        if m and int(m[2], 16) < address:
            loop = [i for i in instructions[: last + 1] if i[0] >= int(m[2], 16)]
            if count(loop, product):
                loops.append(loop)
    return min(loops, key=len, default=[])


def loop_numbers(loop):
    last_wait = max(i for i, (_, text) in enumerate(loop) if text.startswith("WARPGROUP.DEPBAR"))
    return {
        "instructions": len(loop),
        "always issued": len(always_issued(loop)),
        "HGMMA": count(loop, "HGMMA"),
        "MUFU.EX2": count(loop, "MUFU.EX2"),
        "after the last wait": count(loop[last_wait:], "MUFU.EX2"),
        "branches": count(loop, "BRA|BRX|BSSY|CALL"),
    }


def kernel_numbers(registers, stack, shared, instructions):
    limits = [int(m[1], 16) for _, text in instructions if (m := re.search(r"USETMAXREG\S* .*\b(0x[0-9a-f]+)", text))]
    static = shared - RESERVED_BYTES
    return {
        "registers": registers,
        "setmaxnreg": " ".join(map(str, sorted(limits))) or "-",
        "stack": stack,
        "static shared": static,
        "dynamic shared, at most": SHARED_BYTES - static,
        "HGMMA": count(instructions, "HGMMA"),
        "HMMA": count(instructions, "HMMA"),
        "LDG.128": count(instructions, r"LDG\S*\.128"),
    }


def mma_products(name):
    """The products in the code of a kernel of attention_mma.cuh, by its name; None of another kernel."""
    if not (m := re.fullmatch(r"(mma::\w+)<(\d+), \w+(?:, (\w+), (\w+))?>", name)):
        return None
    rows, columns = MMA_TILES[m[1]](int(m[2]))
    keys, values = m[3] == "true", m[4] == "true"
    products = {"mma::attention_forward": 2, "mma::attention_backward_queries": 3}.get(m[1], 1 + 2 * keys + values)
    return products * rows * (columns // 8) * (int(m[2]) // 16)


def loads(name):
    """16-byte and 8-byte loads of a kernel in LOADS; None of another kernel."""
    for pattern, (wide, half) in LOADS.items():
        if m := re.fullmatch(pattern.replace("TYPE", r"(float|bf16|Float8<\w+, \d+>)"), name):
            types = [EIGHT[t] for t in m.groups()]
            return wide + sum(t[0] for t in types), half + sum(t[1] for t in types)
    return None


def markdown(rows, columns):
    lines = [["kernel", *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(str(numbers[column]) for column in columns)] for name, numbers in rows.items()]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def table(compiler, kernels, loops):
    return f"""# What kernels take of an H100

Written by `make test-sass WRITE=1` from the machine code of `train_gpt.cu` and `dev/kernels/gemm_hopper.cuh`, and compared by `make test-sass`
(`test/sass.py`): a number that moves by more than a little has to move here. bf16, sm_90a. Compiler: nvcc {compiler}.

`setmaxnreg`: registers of the producer and of consumers once a kernel has shared them out. Bytes of a block: `stack` in local memory,
`static shared`, and how much dynamic shared memory a launch can request in addition. In the code: `HGMMA` products of a warpgroup,
`HMMA` of a warp, `LDG.128` loads of 16 bytes.

{markdown(kernels, COLUMNS)}
## Attention's loops over tiles

`always issued`: the instructions of a tile without a mask, of a model without ALiBi. Exponentials after the last wait cannot overlap
the products that it waits for.

{markdown(loops, LOOP_COLUMNS)}"""


def read_table(text):
    """Rows of both tables: {name: cells}."""
    tables = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| \n").split(" | ")] if line.startswith("|") else []
        if not cells or cells[0] == "---":
            continue
        if cells[0] == "kernel":
            head, rows = cells[1:], {}
            tables.append(rows)
        else:
            rows[cells[0]] = dict(zip(head, cells[1:]))
    return tables


def far(new, old, most):
    if new == old:
        return False
    return not (new.isdigit() and old.isdigit() and abs(int(new) - int(old)) <= most)


def compare(rows, old_rows, columns):
    """A line for each difference above its limit."""
    lines = [f"{name} is not in the table" for name in rows if name not in old_rows]
    lines += [f"{name} is in the table alone" for name in old_rows if name not in rows]
    for name in rows.keys() & old_rows.keys():
        for column, most in columns.items():
            new, old = str(rows[name][column]), old_rows[name].get(column, "")
            if far(new, old, most):
                lines.append(f"{name}: {column}: {old} in the table, now {new}")
    return sorted(lines)


def verdict(name, faults):
    print(f"ok: {name}" if not faults else f"FAILED: {name}: " + "; ".join(faults))
    return not faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("object")
    args = parser.parse_args()

    functions = code(cuobjdump("--dump-sass", args.object))
    taken = resources(cuobjdump("--dump-resource-usage", args.object))
    ours = readable(sorted(name for name in functions if name in taken and name.startswith("_ZN3gpu")))
    kernels = {short: kernel_numbers(*taken[name], functions[name]) for name, short in ours.items()}
    kernels = dict(sorted(kernels.items()))
    fine = verdict(f"{len(kernels)} kernels have machine code", [] if len(kernels) == len(ours) >= 50 else ["names or kernels lack"])
    fine &= verdict(
        "no kernel keeps more than two registers in local memory",
        [f"{name}: {n['stack']} bytes" for name, n in kernels.items() if n["stack"] > STACK_BYTES],
    )

    by_mma = {name: mma_products(name) for name in kernels if mma_products(name)}
    expected = 2 * (3 * len(HEAD_SIZES) + 2)  # with and without caps and dropout; heads of 192 and 256 have dk and dv apart
    fine &= verdict(
        f"{expected} kernels of attention by mma.sync have the products of a tile",
        [f"{name}: {kernels[name]['HMMA']} instead of {n}" for name, n in by_mma.items() if kernels[name]["HMMA"] != n]
        + [f"{len(by_mma)} kernels"] * (len(by_mma) != expected),
    )
    by_loads = {short: (loads(short), functions[name]) for name, short in ours.items() if loads(short)}
    faults = [f"{len(by_loads)} kernels"] if len(by_loads) != 65 else []  # 18 of AdamW, 6 of Lion, 6 of Muon, 28 activations, 7 others
    for name, (numbers, instructions) in by_loads.items():
        found = count(instructions, r"LDG\S*\.128"), count(instructions, r"LDG\S*\.64")
        faults += [f"{name}: {found} loads of 16 and 8 bytes instead of {numbers}"] * (found != numbers)
    fine &= verdict(f"{len(by_loads)} kernels bound by memory load 16 bytes at a time", faults)

    loops = {}
    for short, (exponentials, products, overlapped) in LOOPS.items():
        loop = next((tile_loop(functions[name]) for name, s in ours.items() if s == short), None)
        if not verdict(f"{short} has a loop over tiles", [] if loop else ["none has two waits and exponentials"]):
            fine = False
            continue
        n = loops[short] = loop_numbers(loop)
        fine &= verdict(f"{short}: {exponentials} exponentials in its loop", [] if n["MUFU.EX2"] == exponentials else [str(n)])
        fine &= verdict(f"{short}: {products} products in its loop", [] if n["HGMMA"] == products else [str(n)])
        fine &= verdict(f"{short}: at most {BRANCHES} branches in its loop", [] if n["branches"] <= BRANCHES else [str(n)])
        biases = count(always_issued(loop), "I2F") if short.endswith("false>") else 0  # a token distance as float
        fine &= verdict(f"{short}: ALiBi's term only behind a branch", [f"{biases} conversions"] if biases else [])
        if overlapped:
            late = n["after the last wait"]
            fine &= verdict(f"{short}: exponentials overlap the products", [f"{late} after the last wait"] if late else [])

    for short in (name for name in kernels if name.startswith("hopper::gemm_kernel")):
        loop = product_loop(next(functions[name] for name, s in ours.items() if s == short), "HGMMA")
        numbers = {name: count(loop, name) for name in PRODUCTS}
        faults = [str(numbers)] if numbers != PRODUCTS or kernels[short]["HGMMA"] != PRODUCTS["HGMMA"] else []
        fine &= verdict(f"{short}: {PRODUCTS['HGMMA']} products, one fence, one wait in its loop of {len(loop)}", faults)

    grouped = {short: functions[name] for name, short in ours.items() if short.startswith("mma::product_kernel")}
    fine &= verdict("three products of experts on tensor cores", [] if len(grouped) == 3 else [f"{len(grouped)} kernels"])
    for short, instructions in grouped.items():
        loop = product_loop(instructions, "HMMA")
        numbers = {name: count(loop, name) for name in GROUPED}
        faults = [str(numbers)] if numbers != GROUPED or kernels[short]["HMMA"] != GROUPED["HMMA"] else []
        fine &= verdict(f"{short}: {GROUPED['HMMA']} products and one barrier in its loop of {len(loop)}", faults)

    if args.write:
        with open(TABLE, "w", encoding="utf-8") as file:
            file.write(table(args.compiler, kernels, loops))
    with open(TABLE, encoding="utf-8") as file:
        text = file.read()
    if f"Compiler: nvcc {args.compiler}." not in text:
        print(f"ok: skipped: dev/kernels/resources.md is of another compiler than nvcc {args.compiler}")
        return 0 if fine else 1
    old_kernels, old_loops = read_table(text)
    faults = compare(kernels, old_kernels, COLUMNS) + compare(loops, old_loops, LOOP_COLUMNS)
    for fault in faults:
        print(fault)
    fine &= verdict("dev/kernels/resources.md is right", [f"{len(faults)} differences; make test-sass WRITE=1 writes it"] if faults else [])
    return 0 if fine else 1


sys.exit(main())
