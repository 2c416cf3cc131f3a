"""What drives stages and shows how far they are. Standard library only at the top.

start      a stage's command line: errors in one line, signals
warm       libraries are loaded once for several stages
mirror     one wandb run a seed, and TensorBoard's event files
trackio_run  the same in trackio, on this machine
status     what is done, stale, running, half done, failed, missing
beforehand  what a later stage would refuse, before the first one begins
replacing  what REPLACE makes anew
grid       many runs: ablations over seeds, the study over presets and seeds
"""
