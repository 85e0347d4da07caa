"""A whole RL run in the library. Read aloud:

    open_run     prove that engines and rewards are sound, resume from the newest checkpoint
    iterate      draw -> score -> experience -> update -> sync and canary -> evaluate -> record -> judge -> checkpoint
    conclude     if a health rule ended the run, go back to the newest sound iteration

``train`` does all three. A pipeline that wants something around each iteration calls them itself:

    with open_run(parts, recorder) as run:
        while not run.is_over:
            iterate(run)
        outcome = conclude(run)
"""

from rlcore.loop.iteration import finish, iterate, open_run, train
from rlcore.loop.recorder import HealthStop, LogRecorder, Recorder, summary_line
from rlcore.loop.run import Components, HeldOut, Run, TrainResult

__all__ = [
    "Components",
    "HealthStop",
    "HeldOut",
    "LogRecorder",
    "Recorder",
    "Run",
    "TrainResult",
    "finish",
    "iterate",
    "open_run",
    "summary_line",
    "train",
]
