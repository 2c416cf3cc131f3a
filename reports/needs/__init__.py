"""What a run needs: before it is made, by counting; and on this machine, by a short run.

shapes    published shapes of models, their parameters, and the bytes of their weights
gpus      what is paid for: GPUs, disk, and the judge
lengths   rows and tokens of the data
memory    bytes on one device, moment by moment
parts     the parts of every stage, and what would make them fit
work      operations and hours
plan      the command `make plan`
inputs    what a rehearsal reads: the longest rows, and weights
rehearse  the command `make rehearse`
"""
