"""A notification that comes with the answer of a statement is heard at once, not with the next one."""

from __future__ import annotations

import select
import socket

from patience import until

from dataloader.queue import db


def test_a_notification_in_the_packet_of_an_answer_is_heard(dsn: str) -> None:
    """libpq reads both at once, so the socket is empty afterwards: a busy client slept until its poll."""
    with (
        db.connect(dsn, name="ear", schema="public") as ear,
        db.connect(dsn, name="mouth", schema="public") as mouth,
        socket.socket(fileno=socket.dup(ear.fileno())) as unread,
    ):
        ear.execute("LISTEN dl_jobs")
        ear.pgconn.send_query(b"SELECT 'the answer'")
        until(lambda: b"the answer" in peeked(unread), "the answer")
        mouth.execute("NOTIFY dl_jobs, 'word'")
        until(lambda: b"word" in peeked(unread), "the notification")
        while ear.pgconn.get_result():
            pass
        assert [note.payload for note in ear.notifies(timeout=0)] == ["word"]


def peeked(unread: socket.socket) -> bytes:
    """What has come and was not read yet."""
    select.select([unread], [], [], 1)
    return unread.recv(65_536, socket.MSG_PEEK)
