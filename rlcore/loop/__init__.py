"""A complete RL run as a library:

    open_run     verify engines and rewards, resume from the newest checkpoint
    iterate      sample -> score -> experience -> update -> sync and canary -> evaluate -> record -> health ->
    checkpoint
    finish       if a health rule stopped the run, restore the last healthy iteration

``train`` calls all three. A pipeline that adds work around each iteration calls them itself:

    with open_run(components, recorder) as run:
        while not run.is_over:
            iterate(run)
        result = finish(run)
"""

from rlcore.components import Components, HeldOut
from rlcore.loop.iteration import finish, iterate, open_run, train
from rlcore.loop.recorder import HealthStop, LogRecorder, Recorder, summary_line
from rlcore.loop.run import Run, TrainResult

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
