"""What starts a stage, what it goes on from, and what there is to see. Standard library only.

start   a stage's command line: errors in one line, signals
warm    libraries are loaded once for several stages
launch  a stage in several processes, through accelerate
grid    many runs: ablations over seeds, the study over presets and seeds
slurm   a job script that goes on after a preemption
kept    JSON lines that an interrupted stage goes on from
status  what is done, stale, running, half done, failed, missing
"""
