"""The contract of a reducer: every all-reduce that starts is waited for exactly once."""

import pytest
import torch

from tests.recorder import Recorder


def test_an_all_reduce_that_is_not_waited_for_once_is_reported():
    recorder = Recorder()
    pending = recorder.start(torch.ones(2))
    with pytest.raises(AssertionError, match="waited for 0 times"):
        recorder.check_each_waited_once()
    pending.wait()
    recorder.check_each_waited_once()
    pending.wait()
    with pytest.raises(AssertionError, match="waited for 2 times"):
        recorder.check_each_waited_once()
