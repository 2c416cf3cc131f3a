"""What a run needs: before it is made, by counting; and on this machine, by a few real steps.

shapes   published shapes of models, their parameters, and the bytes of their weights
gpus     accelerators: memory and speed; processes of a launch
lengths  rows and tokens of the data
memory   bytes on one device, moment by moment
parts    the parts of every stage, and what would make them fit
work     operations and hours
costs    disk, and what the judge is asked
tables   lines of at most 80 columns
plan     the command `make plan`
rehearse the command `make rehearse`
rehearsal_parts  one part, in a process of its own
rehearsal_ppo    PPO's part
rehearsal_bench  what every part needs
rehearsal_table  what was measured, beside the plan
meter    peak memory and time
texts    real posts, or tokens of the real lengths
weights  where the rehearsal's weights come from
"""
