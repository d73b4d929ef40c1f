"""What a SuperNode says is passed on, and tells when to ask it for work."""

import os
import time

import pytest

from flwr_safedshb.node import log_tail
from flwr_safedshb.node.log_tail import LogTail


class Said:
    """A SuperNode that is played, and a clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0
        ear, self.mouth = os.pipe()
        self.voice = LogTail(os.fdopen(ear, "rb"))

    def say(self, words: bytes) -> None:
        os.write(self.mouth, words)
        self.voice.read()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    played = Said()
    monkeypatch.setattr(time, "monotonic", lambda: played.now)
    return played


def test_words_are_passed_on(said: Said, capfd: pytest.CaptureFixture[str]) -> None:
    said.say(b"hello\n")
    said.say(b"\xff half a li")
    os.write(said.mouth, b"ne\n")
    said.voice.read_rest()
    assert capfd.readouterr().err.endswith("half a line\n")
    assert not said.voice.is_closed
    os.close(said.mouth)
    said.voice.read_rest()
    assert said.voice.is_closed


def test_a_message_is_asked_for_at_once_and_until_it_is_found(said: Said) -> None:
    voice = said.voice
    assert voice.poll_delay() == 0.0  # at the start there may be work
    voice.note_poll(found=False)
    assert voice.poll_delay() == log_tail._SLOW_POLL
    said.say(b"INFO: Receiving: train message")
    assert voice.poll_delay() == log_tail._SLOW_POLL
    said.say(b" (ID: 1)\nINFO: Received succ")
    said.say(b"essfully\n")
    assert voice.poll_delay() == 0.0
    voice.note_poll(found=False)
    assert voice.poll_delay() == pytest.approx(log_tail._FAST_POLL)
    voice.note_poll(found=True)
    assert voice.poll_delay() == log_tail._SLOW_POLL
    said.say(b"and no more\n")
    assert voice.poll_delay() == log_tail._SLOW_POLL


def test_a_message_that_never_comes_is_not_asked_for_for_ever(said: Said) -> None:
    said.say(b"Received successfully\n")
    said.now += 3
    said.voice.note_poll(found=False)
    assert said.voice.poll_delay() == log_tail._SLOW_POLL


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"\x1b[92mINFO \x1b[0m:\t[RUN 1]\n", b"\x1b[92mINFO \x1b[0m:\t[RUN 1]\n"),
        ("épsilon\n".encode(), "épsilon\n".encode()),
        (b"\x1b[2J\x1b]0;title\x07\rover", rb"\x1b[2J\x1b]0;title\x07\x0dover"),
        ("\x9b2J".encode(), rb"\xc2\x9b2J"),
        (b"\x1b[999999999999m\x1b", rb"\x1b[999999999999m\x1b"),
    ],
)
def test_names_that_a_server_chooses_move_no_cursor(
    said: bytes, shown: bytes, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as stream, os.fdopen(write, "wb") as other:
        voice = LogTail(stream)
        other.write(said)
        other.flush()
        voice.read()
    assert capfdbinary.readouterr().err == shown
