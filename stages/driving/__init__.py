"""What drives stages and shows how far they are. Standard library only at the top.

start      a stage's command line: errors in one line, signals
warm       libraries are loaded once for several stages
trackers   a stage at wandb, in trackio and in TensorBoard
status     what is done, stale, running, half done, failed, missing
beforehand  what a later stage would refuse, before the first one begins
replacing  what REPLACE makes anew
maker      finds what is missing or stale of a run, and calls its stages
grid       many runs: ablations over seeds, the study over presets and seeds
"""
