"""What a run needs: before it is made, by counting; and on this machine, by a short run.

shapes         published shapes of models and their parameters; rows and tokens of the data
memory         bytes on one device, moment by moment
plan           the parts of every stage, and what fits on which GPUs: the command `make plan`
batch_sizes    rows of a pass where the settings say `auto`
own            what the preset `own` chooses
random_inputs  what a rehearsal reads: random weights, and the longest rows
rehearsal      the command `make rehearse`
"""
