"""A shared lock names who it was shared with, and lasts until the last holder lets go."""

import os

import pytest

from fourstroke.errors import RunFolderError
from fourstroke.store.lock import FolderLock


def test_a_shared_lock_lasts_until_both_have_let_go(tmp_path):
    lock = FolderLock(tmp_path)
    other_holder = os.dup(lock.share(4242))
    lock.close()

    with pytest.raises(RunFolderError, match="in use by a run with process id 4242;"):
        FolderLock(tmp_path)
    os.close(other_holder)
    FolderLock(tmp_path).close()


def test_a_shorter_name_replaces_a_longer_one(tmp_path):
    lock = FolderLock(tmp_path)

    lock.share(4_000_000)
    lock.share(1)

    assert (tmp_path / "lock").read_bytes() == b"1\n"
    lock.close()


def test_a_lock_that_was_given_back_is_not_shared(tmp_path):
    lock = FolderLock(tmp_path)
    lock.close()

    with pytest.raises(AssertionError):
        lock.share(1)
