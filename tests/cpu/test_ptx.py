"""The check that no lane waits alone where all lanes are waited for."""

from tests.ptx import one_lane_blocks

PTX = """
\telect.sync \t%r1|%p1, -1;
\tnot.pred \t%p2, %p1;
\t@%p2 bra \t$L__BB0_2;
\tinside;
$L__BB0_2:
\telect.sync \t%r2|%p3, -1;
\tnot.pred \t%p4, %p3;
\t@%p4 bra \t$L__BB0_9;
\tlast;
\tbra.uni \t$L__BB0_9;
$L__BB0_3:
\tshfl.sync.idx.b32 \t%r3, %r2, 0, 31, -1;
$L__BB0_9:
\tret;
"""


def test_blocks_of_one_lane_are_found() -> None:
    assert [block.strip() for block in one_lane_blocks(PTX)] == ["inside;", "last;"]
