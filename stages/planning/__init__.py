"""What a run needs: computed before it starts, and measured in a short run on this machine.

shapes         published shapes of models, and their parameters
rows           numbers of rows, as far as they are known before the run
memory         bytes on one device, moment by moment
parts          the memory of every part of every stage, and the batch sizes that fit
plan           the command `make plan`
batch_sizes    batch sizes that the settings leave to the plan (`auto`)
own            what the preset `own` chooses
random_inputs  random weights and the longest rows
rehearsal      a short run that measures memory and time: `REHEARSE=1`
"""
