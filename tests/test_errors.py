"""Texts of others, as error messages quote them."""

import time

from hypothesis import given
from hypothesis import strategies as st

from baffle.errors import first_line, one_line


@given(st.text() | st.text("\x1b\x9b\r\n\t\u2028\u202e\ud800\0ab "), st.integers(1, 50))
def test_one_line_is_printable_and_bounded(text: str, most: int) -> None:
    shown = one_line(text, most)
    assert shown.isprintable()
    assert len(shown) <= most
    assert one_line(shown, most) == shown


def test_one_line_keeps_words_apart_and_marks_a_cut() -> None:
    assert one_line("the disk\r\n\tis \x1b[31mfull\x00 – 100 %") == "the disk is [31mfull – 100 %"
    assert one_line("abcdef", 6) == "abcdef"
    assert one_line("abcdefg", 6) == "abcde…"
    assert len(one_line("x" * 1000)) == 300


def test_the_first_line_of_an_error_is_its_message_or_its_type() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


@given(st.text() | st.text("\x1b\x9b\r\n\t\u2028\0ab "))
def test_the_first_line_of_an_error_is_fit_to_be_shown(text: str) -> None:
    assert first_line(ValueError(text)).isprintable()
    assert len(first_line(ValueError(text * 1_000))) <= 1_000


def test_a_text_of_megabytes_is_cut_before_it_is_looked_at() -> None:
    """Strangers can send as many as they like."""
    began = time.process_time()
    for _ in range(100):
        assert len(one_line("\x1bx" * 5_000_000)) == 300
    assert time.process_time() - began < 5
