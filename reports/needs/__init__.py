"""What a run needs: before it is made, by counting; and on this machine, by a short run.

shapes    published shapes of models and their parameters; rows and tokens of the data
gpus      GPUs, and how many a preset is made for
memory    bytes on one device, moment by moment
parts     the parts of every stage, and whether they fit
work      operations and hours
own       what the preset `own` chooses
plan      the command `make plan`
inputs    what a rehearsal reads: random weights, and the longest rows
rehearse  the command `make rehearse`
"""
