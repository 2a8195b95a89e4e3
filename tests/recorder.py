"""What the events of a ``RecordingReducer`` prove."""

from ladder_residual.core.reduce import RecordingReducer


class Recorder(RecordingReducer):
    def check_each_waited_once(self) -> None:
        for number in range(len(self.reductions)):
            waits = self.events.count(("wait", number))
            if waits != 1:
                raise AssertionError(f"all-reduce {number} was waited for {waits} times, expected exactly once")

    def hidden(self) -> list[bool]:
        """For each all-reduce, whether anything was computed between its start and its wait."""
        positions = {event: index for index, event in enumerate(self.events)}
        spans = [(positions["start", k], positions["wait", k]) for k in range(len(self.reductions))]
        return [any(event == "compute" for event, _ in self.events[start:wait]) for start, wait in spans]
