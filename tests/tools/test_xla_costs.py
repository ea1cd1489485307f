"""What a TPU's program moves, multiplies and sends, by lines of XLA's text as its TPU compiler writes them."""

import base64
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_jax.parallel.sharding import ONE_DEVICE
from tests.helpers import load_script
from tools.mosaic import kernel
from tools.xla_costs import HOP, Program, Slice, costliest, devices_of
from tools.xla_text import shapes_of

KERNELS = Path(__file__).parent / "pallas"
ONE, EIGHT = Slice.of("v6e:1x1"), Slice.of("v6e:2x4")
BANDWIDTH, RATE, LINK = 1.638e12, 918e12, 9e10
# A frame of each file that loops and conditionals are told apart by.
PLACES = """FileNames
1 "/x/dflash_jax/decoding/sampling.py"
2 "/x/dflash_jax/ops/attention.py"
3 "/x/dflash_jax/ops/moe.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=0 end_column=0}
2 {file_name_id=2 function_name_id=1 line=20 end_line=20 column=0 end_column=0}
3 {file_name_id=3 function_name_id=1 line=30 end_line=30 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}

"""


def program(text: str, slice_: Slice = ONE, **options) -> Program:
    """A program whose computations begin without indentation."""
    return Program(f"HloModule jit_f, is_scheduled=true\n\n{PLACES}\n{text}", slice_, **options)


def entry(*lines: str, **options) -> Program:
    """A program of one computation."""
    body = "\n".join(f"  {line}" for line in lines)
    return program("ENTRY %main (p: f32[8]) -> f32[8] {\n" + body + "\n}\n", **options)


def moved(found: Program) -> tuple[int, int]:
    figures = found.figures()
    return figures["read"], figures["written"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("bf16[16,2048]{1,0:T(8,128)(2,1)}", 16 * 2048 * 2),
        # Tiles are padded: two rows and columns to 2 x 128, a scalar to 128.
        ("bf16[2,2]{1,0:T(2,128)(2,1)}", 2 * 128 * 2),
        ("s32[]{:T(128)}", 128 * 4),
        # The first axis is the minor one.
        ("f32[3,5]{0,1:T(2,128)}", 128 * 6 * 4),
        ("pred[3]{0:T(512)(128)(4,1)}", 512),
        ("s4[16,256]{1,0:T(64,128)(8,1)}", 64 * 256 // 2),
        ("f8e4m3fn[32,128]{1,0:T(32,128)(4,1)}", 32 * 128),
        ("f32[4,2]", 32),
    ],
)
def test_an_array_has_the_bytes_of_its_tiles(text, size):
    (shape,) = shapes_of(text)
    assert (shape.bytes, shape.in_hbm) == (size, size)


def test_an_array_in_another_memory_is_not_in_hbm():
    (shape,) = shapes_of("bf16[1,16,2048]{2,1,0:T(8,128)(2,1)S(1)}")
    assert (shape.bytes, shape.in_hbm) == (65536, 0)


CHAIN = """
%inner (a: bf16[2048,4096]) -> bf16[2048,4096] {
  %a = bf16[2048,4096]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %bitcast.2 = bf16[2048,4096]{1,0:T(8,128)(2,1)} bitcast(%a)
}

%first (x: bf16[16,2048], a: bf16[2048,4096]) -> bf16[16,4096] {
  %x.1 = bf16[16,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %a.1 = bf16[2048,4096]{1,0:T(8,128)(2,1)} parameter(1)
  %a.2 = bf16[2048,4096]{1,0:T(8,128)(2,1)} fusion(%a.1), kind=kLoop, calls=%inner
  ROOT %conv = bf16[16,4096]{1,0:T(8,128)(2,1)} convolution(%x.1, %a.2), dim_labels=bf_io->bf
}

%both (b: bf16[4096,2048], x: bf16[16,2048], a: bf16[2048,4096]) -> bf16[16,2048] {
  %x.2 = bf16[16,2048]{1,0:T(8,128)(2,1)} parameter(1)
  %a.3 = bf16[2048,4096]{1,0:T(8,128)(2,1)} parameter(2)
  %h = bf16[16,4096]{1,0:T(8,128)(2,1)} fusion(%x.2, %a.3), kind=kOutput, calls=%first
  %b.1 = bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %conv.2 = bf16[16,2048]{1,0:T(8,128)(2,1)} convolution(%h, %b.1), dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[16,2048], a: bf16[2048,4096], b: bf16[4096,2048]) -> bf16[16,2048] {
  %b = bf16[4096,2048]{1,0:T(8,128)(2,1)} parameter(2)
  %start = (bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[4096,2048]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%b)
  %a = bf16[2048,4096]{1,0:T(8,128)(2,1)} parameter(1)
  %x = bf16[16,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %done = bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)} copy-done(%start)
  ROOT %y = bf16[16,2048]{1,0:T(8,128)(2,1)} fusion(%done, %x, %a), kind=kOutput, calls=%both,
    backend_config={"window_config":{"estimated_cycles":"32849"}}
}
"""


def test_a_chain_of_two_products_is_as_by_hand():
    """x [16, 2048], a [2048, 4096] and b [4096, 2048]: b is copied to the vector memory before."""
    figures = program(CHAIN).figures()
    x, weight = 16 * 2048 * 2, 2048 * 4096 * 2
    assert (figures["read"], figures["written"]) == (x + 2 * weight, x)
    assert figures["operations"] == 2 * (2 * 16 * 2048 * 4096)
    # Both are bound by the memory.
    assert figures["predicted_s"] == pytest.approx((2 * x + 2 * weight) / BANDWIDTH)
    # The compiler estimates the fusion; the copy, of which it says nothing, is by arithmetic.
    assert figures["compiler_s"] == pytest.approx(32849 / 1.75e9 + weight / BANDWIDTH)
    assert "runs" in costliest(program(CHAIN), 3)


def test_many_rows_are_bound_by_the_matrix_unit():
    text = CHAIN.replace("[16,", "[4096,")
    operations = 2 * (2 * 4096 * 2048 * 4096)
    weight = 2048 * 4096 * 2
    assert program(text).figures()["predicted_s"] == pytest.approx(operations / RATE + weight / BANDWIDTH)


@pytest.mark.parametrize(
    ("line", "operations"),
    [
        # A batch of 96 products of [32, 32] as a convolution with holes.
        (
            "bf16[96,32,32] convolution(%a, %b), window={size=96 stride=95 lhs_dilate=96}, dim_labels=0bf_0io->0bf",
            96 * 32**3,
        ),
        # Two rows of a weight, each its own output.
        (
            "bf16[32,2,32] convolution(%c, %d), window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_0oi->b0f",
            2 * 32**3,
        ),
        # Four groups of eight rows, each with eight outputs of its own; then of eight inputs.
        ("bf16[8,32] convolution(%f, %f), dim_labels=bf_io->bf, batch_group_count=4", 8 * 32 * 32),
        ("bf16[32,32] convolution(%f, %g), dim_labels=bf_io->bf, feature_group_count=4", 32 * 32 * 8),
        (
            "f32[96,32,32] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}",
            96 * 32**3,
        ),
        # Full precision is six products of bfloat16, the next is three.
        ("f32[32,32] dot(%e, %e), lhs_contracting_dims={1}, operand_precision={highest,highest}", 6 * 32**3),
        ("f32[32,32] dot(%e, %e), lhs_contracting_dims={1}, operand_precision={default,high}", 3 * 32**3),
    ],
)
def test_products_have_their_operations_only(line, operations):
    found = entry(
        "%a = bf16[96,32,32] parameter(0)",
        "%b = bf16[96,32,32] parameter(1)",
        "%c = bf16[32,32,1] parameter(2)",
        "%d = bf16[2,32,32] parameter(3)",
        "%e = f32[32,32] parameter(4)",
        "%f = bf16[32,32] parameter(5)",
        "%g = bf16[8,32] parameter(6)",
        f"ROOT %y = {line}",
    )
    assert found.figures()["operations"] == 2 * operations


def test_eight_bits_are_as_fast_as_the_chip_has_them():
    found = entry(
        "%a = s8[4096,4096] parameter(0)",
        "ROOT %y = s32[4096,4096] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    assert found.figures()["predicted_s"] == pytest.approx(2 * 4096**3 / 1836e12)


@pytest.mark.parametrize("right", ["f8e4m3fn", "bf16"])
def test_the_floor_has_the_rate_that_a_product_of_activations_is_predicted_with(right, monkeypatch):
    """On a v7, which is twice as fast only where both factors are FP8: activations are not."""
    report, seven = load_script("compile/report.py"), Slice.of("tpu7x:1x1x1")

    def product(left: str) -> float:
        found = entry(
            f"%a = {left}[4096,4096] parameter(0)",
            f"%b = {right}[4096,4096] parameter(1)",
            "ROOT %y = f32[4096,4096] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            slice_=seven,
        )
        return found.figures()["predicted_s"]

    work, slot = [(4096**2, 2 * 4096**3)], SimpleNamespace(state=0, read=lambda context, drafts: 0)
    monkeypatch.setattr(report, "weigh", lambda module, layout: SimpleNamespace(work=lambda tokens: work))
    monkeypatch.setattr(report, "measure_slot", lambda *args: slot)
    floor = report.floor(SimpleNamespace(pair=("target", None)), ONE_DEVICE, seven, 4096, 0, 1)
    assert floor["seconds"] == pytest.approx(product("bf16")) == 2 * 4096**3 / 1153.5e12
    assert product("f8e4m3fn") == pytest.approx(floor["seconds"] / (2 if right == "f8e4m3fn" else 1))


LOOP = """
%body (t: (s32[], f32[1024], s32[])) -> (s32[], f32[1024], s32[]) {
  %t = (s32[]{:T(128)}, f32[1024]{0:T(1024)}, s32[]{:T(128)S(6)}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%t), index=0
  %one = s32[]{:T(128)S(6)} constant(2)
  %more = s32[]{:T(128)S(6)} add(%i, %one)
  %v = f32[1024]{0:T(1024)} get-tuple-element(%t), index=1
  %n = s32[]{:T(128)S(6)} get-tuple-element(%t), index=2
  %w = f32[1024]{0:T(1024)} negate(%v)
  ROOT %next = (s32[], f32[1024], s32[]) tuple(%more, %w, %n)
}

%condition (t: (s32[], f32[1024], s32[])) -> pred[] {
  %u = (s32[]{:T(128)S(6)}, f32[1024]{0:T(1024)}, s32[]{:T(128)S(6)}) parameter(0)
  %j = s32[]{:T(128)S(6)} get-tuple-element(%u), index=0
  %m = s32[]{:T(128)S(6)} get-tuple-element(%u), index=2
  ROOT %lt = pred[]{:T(512)S(6)} compare(%j, %m), direction=LT
}

ENTRY %main (x: f32[1024], k: s32[]) -> f32[1024] {
  %zero = s32[]{:T(128)S(6)} constant(3)
  %last = s32[]{:T(128)S(6)} constant(10)
  %k = s32[]{:T(128)S(6)} parameter(1)
  %x = f32[1024]{0:T(1024)} parameter(0)
  %before = f32[1024]{0:T(1024)} exponential(%x)
  %start = (s32[], f32[1024], s32[]) tuple(%zero, %before, %last)
  %loop = (s32[], f32[1024], s32[]) while(%start), condition=%condition, body=%body
  ROOT %y = f32[1024]{0:T(1024)} get-tuple-element(%loop), index=1
}
"""


def test_a_loop_counts_as_often_as_its_condition_says():
    """From 3 to 10 in steps of 2: four times, beside what is before."""
    assert moved(program(LOOP)) == (5 * 4096, 5 * 4096)
    written = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert moved(program(written)) == (8 * 4096, 8 * 4096)


def test_a_loop_within_a_loop_multiplies_and_finds_its_bound_outside():
    inner = LOOP.replace("ENTRY %main", "%inner").replace("%main", "%inner")
    outer = """
%outer_body (t: (s32[], f32[1024], s32[])) -> (s32[], f32[1024], s32[]) {
  %a = (s32[]{:T(128)}, f32[1024]{0:T(1024)}, s32[]{:T(128)S(6)}) parameter(0)
  %b = s32[]{:T(128)S(6)} get-tuple-element(%a), index=0
  %c = f32[1024]{0:T(1024)} get-tuple-element(%a), index=1
  %d = s32[]{:T(128)S(6)} get-tuple-element(%a), index=2
  %e = s32[]{:T(128)S(6)} constant(1)
  %f = s32[]{:T(128)S(6)} add(%b, %e)
  %g = s32[]{:T(128)S(6)} constant(3)
  %h = (s32[], f32[1024], s32[]) tuple(%g, %c, %d)
  %inside = (s32[], f32[1024], s32[]) while(%h), condition=%condition, body=%body
  %k = f32[1024]{0:T(1024)} get-tuple-element(%inside), index=1
  ROOT %l = (s32[], f32[1024], s32[]) tuple(%f, %k, %d)
}

ENTRY %main (x: f32[1024]) -> f32[1024] {
  %m = s32[]{:T(128)S(6)} constant(0)
  %n = s32[]{:T(128)S(6)} constant(9)
  %o = f32[1024]{0:T(1024)} parameter(0)
  %p = (s32[], f32[1024], s32[]) tuple(%m, %o, %n)
  %q = (s32[], f32[1024], s32[]) while(%p), condition=%condition, body=%outer_body
  ROOT %r = f32[1024]{0:T(1024)} get-tuple-element(%q), index=1
}
"""
    # Nine times from 3 to 9 in steps of 2.
    assert moved(program(inner + outer)) == (9 * 3 * 4096, 9 * 3 * 4096)
    # From 3 to the outer loop's counter, and from that counter to 9, in each trip another number.
    for state in ("tuple(%g, %c, %b)", "tuple(%b, %c, %d)"):
        found = program(inner + outer.replace("tuple(%g, %c, %d)", state))
        assert moved(found) == (9 * 4096, 9 * 4096)
        assert "inside ×1 depends on data: counted once" in found.figures()["loops"]


@pytest.mark.parametrize(
    ("known", "changed"),
    [
        ("tuple(%more, %w, %n)", "tuple(%more, %w, %more)"),
        ("add(%i, %one)", "add(%i, %n)"),
        ("add(%i, %one)", "multiply(%i, %one)"),
        ("add(%i, %one)", "add(%n, %one)"),
    ],
)
def test_trips_are_not_known_where_a_loop_changes_its_bound_or_adds_no_constant(known, changed):
    found = program(LOOP.replace(known, changed))
    assert list(found.figures()["loops"]) == ["loop ×1 depends on data: counted once"]


def test_a_loop_that_depends_on_data_is_that_of_the_rounds():
    figures = program(LOOP.replace("tuple(%zero, %before, %last)", "tuple(%zero, %before, %k)")).figures()
    assert (figures["read"], figures["once"]["read"]) == (4096, 4096)
    assert list(figures["loops"]) == ["loop ×1 depends on data: counted once"]


CONTEXT = """
%gathered (pool: bf16[32,256,128], i: s32[8]) -> bf16[8,256,128] {
  %pool = bf16[32,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %at = s32[8]{0:T(128)S(1)} parameter(1)
  %sure = s32[8]{0:T(128)} custom-call(%at), custom_call_target="AssumeGatherIndicesInBound"
  ROOT %g = bf16[8,256,128]{2,1,0:T(8,128)(2,1)S(1)} gather(%pool, %sure), slice_sizes={1,256,128}
}

%body (t: (s32[], bf16[32,256,128], s32[8], s32[])) -> (s32[], bf16[32,256,128], s32[8], s32[]) {
  %t = (s32[]{:S(6)}, bf16[32,256,128]{2,1,0:T(8,128)(2,1)}, s32[8]{0:T(128)S(1)}, s32[]{:S(6)}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%t), index=0
  %one = s32[]{:S(6)} constant(1)
  %more = s32[]{:S(6)} add(%i, %one)
  %p = bf16[32,256,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%t), index=1
  %a = s32[8]{0:T(128)S(1)} get-tuple-element(%t), index=2
  %n = s32[]{:S(6)} get-tuple-element(%t), index=3
  %pages = bf16[8,256,128]{2,1,0:T(8,128)(2,1)S(1)} fusion(%p, %a), kind=kCustom, calls=%gathered
  ROOT %next = (s32[], bf16[32,256,128], s32[8], s32[]) tuple(%more, %p, %a, %n)
}

%condition (t: (s32[], bf16[32,256,128], s32[8], s32[])) -> pred[] {
  %u = (s32[]{:S(6)}, bf16[32,256,128]{2,1,0:T(8,128)(2,1)}, s32[8]{0:T(128)S(1)}, s32[]{:S(6)}) parameter(0)
  %j = s32[]{:S(6)} get-tuple-element(%u), index=0
  %m = s32[]{:S(6)} get-tuple-element(%u), index=3
  ROOT %lt = pred[]{:S(6)} compare(%j, %m), direction=LT
}

ENTRY %main (x: bf16[32,256,128], a: s32[8], k: s32[]) -> bf16[32,256,128] {
  %zero = s32[]{:S(6)} constant(0)
  %x = bf16[32,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = s32[8]{0:T(128)S(1)} parameter(1)
  %k = s32[]{:S(6)} parameter(2)
  %start = (s32[], bf16[32,256,128], s32[8], s32[]) tuple(%zero, %x, %b, %k)
  %loop = (s32[], bf16[32,256,128], s32[8], s32[]) while(%start), condition=%condition, body=%body,
    metadata={op_name="f" stack_frame_id=2}
  ROOT %y = bf16[32,256,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(("context", "pieces"), [(0, 0), (1, 1), (2048, 1), (2049, 2), (8192, 4), (100_000, 4)])
def test_a_loop_over_the_context_takes_the_pieces_of_it(context, pieces):
    """Eight pages of 256 positions at a time, of 32; only those are read."""
    found = program(CONTEXT, context=context, pools={32 * 256 * 128: 8192})
    assert moved(found) == (pieces * 8 * 256 * 128 * 2, 0)


def test_only_what_a_fusion_slices_is_read():
    found = program("""
%sliced (w: bf16[256,64,2048], i: s32[]) -> bf16[64,2048] {
  %w.1 = bf16[256,64,2048]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i.1 = s32[]{:T(128)S(6)} parameter(1)
  %b = bf16[256,1,64,2048]{3,2,1,0:T(8,128)(2,1)} bitcast(%w.1)
  %s = bf16[1,1,64,2048]{3,2,1,0:T(8,128)(2,1)} dynamic-slice(%b, %i.1, %i.1), dynamic_slice_sizes={1,1,64,2048}
  %t = bf16[1,1,64,2048]{3,2,1,0:T(8,128)(2,1)} slice(%b), slice={[0:1], [0:1], [0:64], [0:2048]}
  ROOT %sum = bf16[1,1,64,2048]{3,2,1,0:T(8,128)(2,1)} add(%s, %t)
}

ENTRY %main (w: bf16[256,64,2048], i: s32[]) -> bf16[64,2048] {
  %w = bf16[256,64,2048]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  ROOT %f = bf16[1,1,64,2048]{3,2,1,0:T(8,128)(2,1)} fusion(%w, %i), kind=kLoop, calls=%sliced
}
""")
    assert moved(found) == (2 * 64 * 2048 * 2, 64 * 2048 * 2)


EXPERT = """
%tiled (w: f8e4m3fn[512,256,4096]) -> f8e4m3fn[512,256,4096] {
  %w.2 = f8e4m3fn[512,256,4096]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy = f8e4m3fn[512,256,4096]{2,1,0:T(8,128)(4,1)} copy(%w.2)
}

%named (w: f8e4m3fn[512,256,4096]) -> f8e4m3fn[512,256,4096] {
  %w.3 = f8e4m3fn[512,256,4096]{2,1,0:T(32,128)(4,1)} parameter(0)
  %inner = f8e4m3fn[512,256,4096]{2,1,0:T(8,128)(4,1)} fusion(%w.3), kind=kLoop, calls=%tiled
  ROOT %bitcast = f8e4m3fn[512,256,4096]{2,1,0:T(8,128)(4,1)} bitcast(%inner)
}

%expert (w: f8e4m3fn[512,256,4096], i: s32[]) -> bf16[256,4096] {
  %w.1 = f8e4m3fn[512,256,4096]{2,1,0:T(32,128)(4,1)} parameter(0)
  %i.1 = s32[]{:T(128)S(6)} parameter(1)
  %outer = f8e4m3fn[512,256,4096]{2,1,0:T(8,128)(4,1)} fusion(%w.1), kind=kLoop, calls=%named
  %wide = bf16[512,256,4096]{2,1,0:T(8,128)(2,1)} convert(%outer)
  ROOT %s = bf16[1,256,4096]{2,1,0:T(8,128)(2,1)S(1)} dynamic-slice(%wide, %i.1), dynamic_slice_sizes={1,256,4096}
}

ENTRY %main (w: f8e4m3fn[512,256,4096], i: s32[]) -> bf16[1,256,4096] {
  %w = f8e4m3fn[512,256,4096]{2,1,0:T(32,128)(4,1)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  ROOT %f = bf16[1,256,4096]{2,1,0:T(8,128)(2,1)S(1)} fusion(%w, %i), kind=kLoop, calls=%expert
}
"""


def test_what_a_fusion_converts_or_lays_out_anew_is_read_where_it_is_taken():
    assert moved(program(EXPERT)) == (256 * 4096, 0)
    whole = EXPERT.replace("dynamic-slice(%wide, %i.1)", "negate(%wide)")
    assert moved(program(whole)) == (512 * 256 * 4096, 0)
    # A copy that a fusion returns reads all of it.
    start = EXPERT.index("%expert (w")
    copy = (
        EXPERT[:start]
        + """ENTRY %main (w: f8e4m3fn[512,256,4096]) -> f8e4m3fn[512,256,4096] {
  %w = f8e4m3fn[512,256,4096]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %f = f8e4m3fn[512,256,4096]{2,1,0:T(8,128)(4,1)} fusion(%w), kind=kLoop, calls=%named
}
"""
    )
    assert moved(program(copy)) == (512 * 256 * 4096, 512 * 256 * 4096)


BLOCKS = """
%body (t: (s32[], bf16[42,128], s32[512,2], s32[])) -> (s32[], bf16[42,128], s32[512,2], s32[]) {
  %t = (s32[]{:S(6)}, bf16[42,128]{1,0:T(8,128)(2,1)}, s32[512,2]{1,0:T(8,128)S(1)}, s32[]{:S(6)}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%t), index=0
  %one = s32[]{:S(6)} constant(1)
  %more = s32[]{:S(6)} add(%i, %one)
  %y = bf16[42,128]{1,0:T(8,128)(2,1)} get-tuple-element(%t), index=1
  %of = s32[512,2]{1,0:T(8,128)S(1)} get-tuple-element(%t), index=2
  %n = s32[]{:S(6)} get-tuple-element(%t), index=3
  %block = bf16[32,128]{1,0:T(8,128)(2,1)S(1)} broadcast(%one), dimensions={}
  %u = bf16[42,128]{1,0:T(8,128)(2,1)} dynamic-update-slice(%y, %block, %i, %i)
  ROOT %next = (s32[], bf16[42,128], s32[512,2], s32[]) tuple(%more, %u, %of, %n)
}

%condition (t: (s32[], bf16[42,128], s32[512,2], s32[])) -> pred[] {
  %v = (s32[]{:S(6)}, bf16[42,128]{1,0:T(8,128)(2,1)}, s32[512,2]{1,0:T(8,128)S(1)}, s32[]{:S(6)}) parameter(0)
  %j = s32[]{:S(6)} get-tuple-element(%v), index=0
  %m = s32[]{:S(6)} get-tuple-element(%v), index=3
  ROOT %lt = pred[]{:S(6)} compare(%j, %m), direction=LT
}

ENTRY %main (x: bf16[42,128], a: s32[512,2], k: s32[]) -> bf16[42,128] {
  %zero = s32[]{:S(6)} constant(0)
  %x = bf16[42,128]{1,0:T(8,128)(2,1)} parameter(0)
  %a = s32[512,2]{1,0:T(8,128)S(1)} parameter(1)
  %k = s32[]{:S(6)} parameter(2)
  %start = (s32[], bf16[42,128], s32[512,2], s32[]) tuple(%zero, %x, %a, %k)
  %loop = (s32[], bf16[42,128], s32[512,2], s32[]) while(%start), condition=%condition, body=%body,
    metadata={op_name="f" stack_frame_id=3}
  ROOT %z = bf16[42,128]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""


def test_a_loop_over_blocks_of_rows_has_a_block_for_each_row_or_all_of_its_list():
    """Blocks of 32 rows for ten choices, of 512 experts; then with a list of seven blocks."""
    block = 32 * 128 * 2
    assert moved(program(BLOCKS)) == (0, 10 * block)
    before = "%x = bf16[42,128]{1,0:T(8,128)(2,1)} parameter(0)"
    text = BLOCKS.replace(
        before, before + "\n  %b = bf16[16,128]{1,0:T(8,128)(2,1)} slice(%x), slice={[0:16], [0:128]}"
    )
    assert "once" not in program(text).figures()
    assert moved(program(BLOCKS.replace("s32[512,2]", "s32[7,2]"))) == (0, 7 * block)
    # Without a list, blocks of 32 follow one another: 100 rows are four.
    text = BLOCKS.replace("s32[512,2]", "s32[512]").replace("bf16[42,", "bf16[132,")
    assert moved(program(text)) == (0, 4 * block)


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_update_in_place_moves_the_update(is_fused):
    lines = """  %c = bf16[8192,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %u = bf16[16,8,128]{2,1,0:T(8,128)(2,1)} parameter(1)
  %i = s32[]{:T(128)S(6)} parameter(2)
"""
    update = "ROOT %d = bf16[8192,8,128]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%c, %u, %i, %i, %i)\n}\n"
    fused = f"%inside (c: bf16[8192,8,128]) -> bf16[8192,8,128] {{\n{lines}  {update}\n"
    call = "ROOT %f = bf16[8192,8,128]{2,1,0:T(8,128)(2,1)} fusion(%c, %u, %i), kind=kLoop, calls=%inside\n}\n"
    text = f"ENTRY %main (c: bf16[8192,8,128]) -> bf16[8192,8,128] {{\n{lines}  {call if is_fused else update}"
    assert moved(program(fused * is_fused + text)) == (16 * 8 * 128 * 2, 16 * 8 * 128 * 2)


BRANCHES = """
%cheap (t: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0:T(1024)} parameter(0)
  ROOT %b = f32[1024]{0:T(1024)} negate(%a)
}

%dear (t: f32[1024]) -> f32[1024] {
  %c = f32[1024]{0:T(1024)} parameter(0)
  %d = f32[1024]{0:T(1024)} negate(%c)
  ROOT %e = f32[1024]{0:T(1024)} negate(%d)
}

ENTRY %main (x: f32[1024], p: s32[]) -> f32[1024] {
  %x = f32[1024]{0:T(1024)} parameter(0)
  %p = s32[]{:T(128)S(6)} parameter(1)
  ROOT %y = f32[1024]{0:T(1024)} conditional(%p, %x, %x), branch_computations={%cheap, %dear},
    metadata={op_name="f" stack_frame_id=1}
}
"""


def test_a_conditional_of_the_sampling_counts_its_greedy_branch_and_others_the_longest():
    first = "branch_computations={%cheap, %dear}"
    assert moved(program(BRANCHES)) == (4096, 4096)
    assert moved(program(BRANCHES.replace(first, "branch_computations={%dear, %cheap}"))) == (8192, 8192)
    named = "true_computation=%dear, false_computation=%cheap"
    assert moved(program(BRANCHES.replace(first, named))) == (4096, 4096)
    # The stack of an expert's branch has the sampling above it, not innermost.
    assert moved(program(BRANCHES.replace("stack_frame_id=1", "stack_frame_id=3"))) == (8192, 8192)


GROUPS = "replica_groups=mesh['data'=1,'tensor0'=2,'tensor1'=2,'tensor2'=2] {'tensor0','tensor1','tensor2'}"


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        (GROUPS, 8),
        (GROUPS.replace(" {'tensor0',", " {").replace("'tensor1',", ""), 2),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups={{0,2,4},{1,3,5}}", 3),
        ("source_target_pairs={{0,1},{1,0}}", 2),
        ("dimensions={0}", 1),
    ],
)
def test_the_devices_of_a_collective(groups, devices):
    assert devices_of(f"channel_id=1, {groups}, to_apply=%add") == devices


def collective(name: str, *between: str, size: str = "bf16[1,16,2048]{2,1,0:T(8,128)(2,1)S(1)}") -> Program:
    """A program with a collective over eight devices that starts, and ends after ``between``."""
    return entry(
        f"%x = {size} parameter(0)",
        "%w = bf16[2048,4096]{1,0:T(8,128)(2,1)} parameter(1)",
        f"%start = {size} {name}-start(%x), channel_id=1, {GROUPS}, to_apply=%add",
        *between,
        f"ROOT %done = {size} {name}-done(%start)",
        slice_=EIGHT,
    )


def test_collectives_take_hops_and_bytes():
    """A slice of 2 x 4: one hop and three along its axes, twice for a sum; two links carry 7/8 of the array."""
    size = 16 * 2048 * 2
    sums, gathered = collective("all-reduce").figures(), collective("all-gather").figures()
    assert (sums["collectives"], sums["sent"], sums["hidden_s"]) == (1, size, 0)
    assert sums["collective_s"] == pytest.approx(8 * HOP + 2 * size * 7 / 8 / (2 * LINK))
    assert gathered["collective_s"] == pytest.approx(4 * HOP + 8 * size * 7 / 8 / (2 * LINK))
    assert sums["predicted_s"] == sums["collective_s"]


@pytest.mark.parametrize(
    ("line", "read", "written"),
    [
        ("(bf16[16,2048], bf16[128,2048]) all-gather-start(%x), dimensions={0}", 1, 8),
        ("((bf16[16,2048], f32[8,1024]), (bf16[128,2048], f32[64,1024])) all-gather-start(%x, %y)", 1.5, 12),
        ("(bf16[16,2048], bf16[16,2048], u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x)", 1, 1),
        ("bf16[16,2048] all-reduce-start(%x), to_apply=%add", 1, 1),
        ("(bf16[16,2048], f32[8,1024]) all-reduce-start(%x, %y), to_apply=%add", 1.5, 1.5),
    ],
)
def test_a_collective_writes_its_results_only(line, read, written):
    """Some return their operands too."""
    found = entry("%x = bf16[16,2048] parameter(0)", "%y = f32[8,1024] parameter(1)", f"%s = {line}", slice_=EIGHT)
    assert moved(found) == (read * 65536, written * 65536)


def test_what_runs_between_start_and_end_hides_a_collective():
    copy = "%c = bf16[2048,4096]{1,0:T(8,128)(2,1)} copy(%w)"
    seconds = 2 * 2048 * 4096 * 2 / BANDWIDTH
    found = collective("all-reduce", copy).figures()
    assert found["hidden_s"] == found["collective_s"]
    assert found["predicted_s"] == pytest.approx(seconds)
    long = collective("all-reduce", copy, size="bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)}").figures()
    assert long["hidden_s"] == pytest.approx(seconds)
    assert long["predicted_s"] == pytest.approx(long["collective_s"])


def test_work_hides_one_collective_at_a_time():
    """Two are under way while an array is copied, and a third is, which has no start and end of its own."""
    size = "bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)}"
    work = ["%c = bf16[2048,4096]{1,0:T(8,128)(2,1)} copy(%w)", f"%sum = {size} all-reduce(%x), {GROUPS}"]
    seconds, one = 2 * 2048 * 4096 * 2 / BANDWIDTH, EIGHT.collective("all-reduce", 8, 4096 * 2048 * 2)

    def hidden(repeats: int) -> float:
        copies = [line.replace("%c ", f"%c{i} ") for i in range(repeats) for line in work[:1]]
        second = [f"%start.2 = {size} all-reduce-start(%x), channel_id=2, {GROUPS}"]
        done = [f"%done.2 = {size} all-reduce-done(%start.2)"]
        return collective("all-reduce", *second, *copies, work[1], *done, size=size).figures()["hidden_s"]

    assert seconds < one
    assert hidden(1) == pytest.approx(seconds)
    assert hidden(100) == pytest.approx(2 * one)


def test_a_collective_that_starts_without_operands_is_under_way_from_its_update_on():
    """As a SparseCore's does."""
    size = "bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)}"
    copy = "%c{} = bf16[2048,4096]{{1,0:T(8,128)(2,1)}} copy(%w)"
    lines = (
        f"%x = {size} parameter(0)",
        "%w = bf16[2048,4096]{1,0:T(8,128)(2,1)} parameter(1)",
        "%start = ((), (), s32[]{:S(2)}) call-start(), to_apply=%called",
        copy.format(1),
        f"%update = (({size}), {size}) call-update(%start, %x)",
        copy.format(2),
        f"%done = {size} call-done(%update)",
        copy.format(3),
    )
    called = f"""
%called (s: bf16[4096,2048]) -> bf16[4096,2048] {{
  %s = {size} parameter(0)
  ROOT %all = {size} all-reduce(%s), {GROUPS}
}}

ENTRY %main (x: bf16[4096,2048], w: bf16[2048,4096]) -> bf16[4096,2048] {{
"""
    found = program(called + "\n".join(f"  {line}" for line in lines) + "\n}\n", EIGHT)
    assert found.figures()["hidden_s"] == pytest.approx(2 * 2048 * 4096 * 2 / BANDWIDTH)
    # An end that is not here hides nothing.
    endless = called + "\n".join(f"  {line}" for line in lines if "done" not in line) + "\n}\n"
    assert program(endless, EIGHT).figures()["hidden_s"] == 0


def test_work_that_hides_a_collective_of_a_call_hides_none_around_it():
    size = "bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)}"
    copy = "  %c = bf16[2048,4096]{1,0:T(8,128)(2,1)} copy(%w)\n"
    inside = f"""  %in = {size} all-reduce-start(%s), {GROUPS}
{copy}  %out = {size} all-reduce-done(%in)
"""
    found = program(
        f"""
%called (s: bf16[4096,2048], w: bf16[2048,4096]) -> bf16[4096,2048] {{
  %s = {size} parameter(0)
  %w = bf16[2048,4096]{{1,0:T(8,128)(2,1)}} parameter(1)
{inside}  ROOT %r = {size} bitcast(%out)
}}

ENTRY %main (x: bf16[4096,2048], w: bf16[2048,4096]) -> bf16[4096,2048] {{
  %x = {size} parameter(0)
  %v = bf16[2048,4096]{{1,0:T(8,128)(2,1)}} parameter(1)
  %start = {size} all-reduce-start(%x), {GROUPS}
  %y = {size} call(%x, %v), to_apply=%called
  ROOT %done = {size} all-reduce-done(%start)
}}
""",
        EIGHT,
    )
    assert found.figures()["hidden_s"] == pytest.approx(2 * 2048 * 4096 * 2 / BANDWIDTH)


def test_a_collective_inside_of_a_fusion_counts():
    found = program(
        f"""
%reduced (x: bf16[16,2048]) -> bf16[16,2048] {{
  %x.1 = bf16[16,2048]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  ROOT %all = bf16[16,2048]{{1,0:T(8,128)(2,1)S(1)}} all-reduce(%x.1), {GROUPS}, to_apply=%add
}}

ENTRY %main (x: bf16[16,2048]) -> bf16[16,2048] {{
  %x = bf16[16,2048]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  ROOT %f = bf16[16,2048]{{1,0:T(8,128)(2,1)S(1)}} fusion(%x), kind=kCustom, calls=%reduced
}}
""",
        EIGHT,
    )
    assert found.figures()["collectives"] == 1


def test_slices_have_their_hops():
    """A group of a slice is where it has the fewest; both halves of a v7 are an axis."""
    assert EIGHT.collective("all-reduce", 1, 100) == 0
    assert EIGHT.collective("all-reduce", 2, 0) == 2 * HOP
    assert EIGHT.collective("all-reduce", 4, 0) == 4 * HOP
    assert EIGHT.collective("collective-permute", 8, 0) == HOP
    assert Slice.of("v6e:8x8").collective("all-gather", 16, 0) == 6 * HOP
    assert Slice.of("tpu7x:2x2x1").shape == (2, 2, 1, 2)
    assert Slice.of("tpu7x:2x2x1").collective("all-reduce", 8, 0) == 6 * HOP


def test_an_operation_has_the_lines_that_it_comes_from():
    """Innermost first; a parent is written as its number and one."""
    (cost,) = entry(
        "%x = f32[1024]{0:T(1024)} parameter(0)",
        'ROOT %y = f32[1024]{0:T(1024)} negate(%x), metadata={op_name="f" stack_frame_id=3}',
    ).costs
    assert cost.source == "moe.py:30 < sampling.py:10"


def test_an_estimate_that_stands_for_none_is_none():
    line = '%y = f32[1024]{{0:T(1024)}} negate(%x), backend_config={{"window_config":{{"estimated_cycles":"{}"}}}}'
    none, some = (
        entry("%x = f32[1024]{0:T(1024)} parameter(0)", f"ROOT {line.format(n)}").figures() for n in (2**63 - 1, 3500)
    )
    assert none["compiler_s"] == pytest.approx(8192 / BANDWIDTH)
    assert some["compiler_s"] == pytest.approx(2e-6)


# Pallas kernels, as modules.

MATMUL = (KERNELS / "product.mlir").read_text()


def test_a_kernel_fetches_a_block_again_only_where_another_was_between():
    """x by (i, k) and w by (k, j) change at each of 16 points, the result by (i, j) at each second one."""
    inputs, results, products = kernel(MATMUL.encode(), ((512, 2048), (2048, 2048)), ((512, 2048),))
    assert inputs == [16 / (2 * 2), 16 / (2 * 4)]
    assert results == [1.0]
    assert products == {"bf16": 16 * 2 * 256 * 1024 * 512}
    # With k in one piece x stays while j goes on.
    whole = MATMUL.replace("2, 4, 2>", "2, 4, 1>").replace("1024x", "2048x").replace("x1024", "x2048")
    whole = whole.replace("256, 1024>", "256, 2048>").replace("1024, 512>", "2048, 512>")
    assert kernel(whole.encode(), ((512, 2048), (2048, 2048)), ((512, 2048),))[0] == [1.0, 2.0]


@pytest.mark.parametrize(("precision", "passes"), [("fp32", 6), ("bf16", 1)])
def test_a_kernels_products_at_full_precision_are_six(precision, passes):
    text = MATMUL.replace(
        "dimension_numbers =", f"precision = #tpu.contract_precision<{precision}>, dimension_numbers ="
    )
    _, _, products = kernel(text.encode(), ((512, 2048), (2048, 2048)), ((512, 2048),))
    assert products == {"bf16": passes * 16 * 2 * 256 * 1024 * 512}


def test_the_last_block_of_an_axis_is_what_is_left_of_it():
    """Of 400 rows in blocks of 256 the second has 144; of 1,900 columns in blocks of 1,024, it has 876."""
    inputs, results, _ = kernel(MATMUL.encode(), ((400, 1900), (1900, 2048)), ((400, 2048),))
    assert inputs == pytest.approx([4, 2])
    assert results == pytest.approx([1])


GROUPED = (KERNELS / "grouped.mlir").read_text()


@pytest.mark.parametrize(("rows", "tile", "experts"), [(8, 8, 8), (128, 128, 32), (4096, 256, 32), (16, 8, 17)])
def test_a_grouped_product_reads_each_expert_once_and_no_more_than_rows(rows, tile, experts):
    """`jax.lax.ragged_dot` of 32 experts: a visit for each expert and for each further tile of rows."""
    visits = 32 + rows // tile - 1
    text = GROUPED.replace("VISITS", str(visits)).replace("TILE", str(tile))
    shapes = (1,), (visits,), (visits,), (rows, 2048), (32, 2048, 1024)
    inputs, results, _ = kernel(text.encode(), shapes, ((rows, 1024),))
    assert inputs == pytest.approx([0, 0, 0, 1, experts / 32])
    assert results == pytest.approx([1])


@pytest.mark.parametrize("is_fused", [False, True])
def test_passes_over_sorted_rows_read_each_expert_once_and_one_more_a_boundary(is_fused):
    """Eight passes of 128 rows over 32 experts: 39 in all, five a pass at most; one pass reads all."""
    body = base64.b64encode(GROUPED.replace("VISITS", "32").replace("TILE", "128").encode()).decode()
    call = f'custom-call(%x, %of), custom_call_target="tpu_custom_call", backend_config={{"body":"{body}"}}'
    weight, new = "bf16[32,2048,1024]{2,1,0:T(8,128)(2,1)}", "bf16[128,1024]{1,0:T(8,128)(2,1)S(1)}"
    row = "%x = bf16[128,2048]{1,0:T(8,128)(2,1)S(1)}"
    fused = (
        f"%fused (of: bf16[32,2048,1024]) -> bf16[128,1024] {{\n  %of = {weight} parameter(0)\n  {row} parameter(1)\n"
    )
    fused += f"  ROOT %mm = {new} {call}\n}}\n"
    used = "fusion(%of, %x), kind=kCustom, calls=%fused" if is_fused else call
    text = BLOCKS.replace("s32[512,2]{1,0:T(8,128)S(1)}", weight).replace("s32[512,2]", "bf16[32,2048,1024]")
    block = "bf16[32,128]{1,0:T(8,128)(2,1)S(1)} broadcast(%one), dimensions={}"
    text = text.replace(f"%block = {block}", f"{row} broadcast(%one), dimensions={{}}\n  %block = {new} {used}")
    text = fused * is_fused + text.replace("bf16[42,128]", "bf16[1152,1024]")
    expert, rows = 2048 * 1024 * 2, 128 * 1024 * 2
    assert moved(program(text)) == (8 * 5 * expert, 8 * rows)
    assert moved(program(text.replace("1152", "256"))) == (32 * expert, rows)
    # Of other loops the rows are not known to be in the order of their experts.
    assert moved(program(text.replace("stack_frame_id=3", "stack_frame_id=1"))) == (32 * expert, rows)


COPIES = (KERNELS / "copies.mlir").read_text()


@pytest.mark.parametrize(("context", "pages"), [(256, 1), (1024, 4), (2048, 8)])
def test_pages_past_the_context_are_not_fetched(context, pages):
    """Two rows of eight pages, of a pool of 40; the page after the last is the last again."""
    text = (KERNELS / "pages.mlir").read_bytes()
    inputs, results, _ = kernel(text, ((2,), (2, 8), (40, 256, 128)), ((2, 8, 128),), context)
    assert inputs == pytest.approx([0, 0, 2 * pages / 40])
    assert results == [1.0]


@pytest.mark.parametrize(("context", "pieces"), [(0, 0), (512, 4), (1024, 8)])
def test_copies_in_a_kernel_count_over_the_context(context, pieces):
    """The number of pieces is read from memory: it is taken to be the context's."""
    inputs, results, _ = kernel(COPIES.encode(), ((1024, 512), (1,)), ((128, 512),), context)
    assert inputs == [pieces / 8, 1.0]
    assert results == [1.0]


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_call_moves_the_parts_that_are_in_hbm(is_fused):
    """Also where XLA fuses it with what is before; its text may have ends of lines in its metadata."""
    body = base64.b64encode(MATMUL.encode()).decode()
    lines = """  %x = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %w = bf16[2048,2048]{1,0:T(8,128)(2,1)} parameter(1)
"""
    call = f"""  ROOT %mm.1 = bf16[512,2048]{{1,0:T(8,128)(2,1)}} custom-call(%x, %w),
custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"a": 1
}}}}, backend_config={{"custom_call_config":{{"body":"{body}"}}}}
}}
"""
    fusion = "  ROOT %f = bf16[512,2048]{1,0:T(8,128)(2,1)} fusion(%x, %w), kind=kCustom, calls=%inside\n}\n"
    head = "{} (x: bf16[512,2048], w: bf16[2048,2048]) -> bf16[512,2048] {{\n" + lines.replace("{", "{{").replace(
        "}", "}}"
    )
    text = head.format("%inside") + call + "\n" + head.format("ENTRY %main") + fusion
    found = program(text if is_fused else head.format("ENTRY %main") + call)
    assert moved(found) == (2 * 2048 * 2048 * 2, 512 * 2048 * 2)
    assert found.figures()["operations"] == 16 * 2 * 256 * 1024 * 512
