"""What a page looks like: cells of a table, and the command that builds it."""

from baffle.paper.page import made_by, table


def test_numbers_are_rounded_and_grouped_and_nothing_is_a_dash() -> None:
    assert table(("a", "b", "c", "d"), [["K = 20", 12.345678, 1234567, None]]) == (
        "| a | b | c | d |\n|---|---|---|---|\n| K = 20 | 12.35 | 1,234,567 | – |"
    )


def test_the_command_names_the_chosen_rows_as_a_shell_reads_them() -> None:
    about = {"target": "table1", "scale": "full", "date": "2001-02-03", "commit": "abc"}
    assert made_by(about) == "`baffle paper table1 --scale full`, 2001-02-03, commit abc"
    chosen = made_by(about | {"only": ["K = 20", "back"]})
    assert chosen.startswith("`baffle paper table1 --scale full --only 'K = 20' --only back`, ")
