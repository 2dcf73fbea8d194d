"""The recording's own words."""

from tune_kernels.tuner.record.recording import summary_of


def test_a_compilers_message_in_one_line() -> None:
    assembler = ("PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas a.ptx, line 9; error   : Unexpected "
                 "'cvt'\nptxas a.ptx, line 10; error   : another\nRepro command: ptxas -v")
    assert summary_of(assembler) == "Unexpected 'cvt'"
    assert summary_of("at 3:4:\n  tl.store(x)\n  ^\nstore takes two arguments\n") == "store takes two arguments"
    assert summary_of("at 42:4:\n    tl.static_assert(N <= M)\n    ^") == "tl.static_assert(N <= M)"
    assert summary_of(" \n") == "no message"
