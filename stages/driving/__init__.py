"""What drives stages and shows how far they are. Standard library only at the top.

start      a stage's command line: errors in one line, signals
warm       a command to its end: a process, or a fork after libraries are loaded once
trackers   a stage at wandb and in TensorBoard
status     what is done, stale, running, half done, failed, missing
wanted     which stages lead to a goal, which runs there are
replacing  what REPLACE makes anew
maker      finds what is missing or stale of a run, and calls its stages
grid       many runs: ablations and rivals over seeds, the study over presets and seeds
"""
