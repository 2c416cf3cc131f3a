"""What a run stands on, what starts it, and what there is to see. Standard library only at the top.

files     files that are whole or absent, their hashes, JSON lines that a kill leaves good
hub       models and data sets of the hub, each at one commit
machine   what a run was made with
code      hashes of the code that makes a stage
progress  how far, how long it will take, lines of 80 columns
signals   what is under way is finished first
start     a stage's command line: errors in one line, signals
warm      libraries are loaded once for several stages
launch    a stage in several processes, through accelerate
replacing what REPLACE makes anew
grid      many runs: ablations over seeds, the study over presets and seeds
slurm     a job script that goes on after a preemption
status    what is done, stale, running, half done, failed, missing
mirror    one wandb run a seed, and TensorBoard's event files
"""
