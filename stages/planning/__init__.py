"""What a run needs, before it is made, by counting.

shapes   published shapes of models, and their parameters
cards    accelerators: memory and speed
lengths  rows and tokens of the data
networks one network: parameters, and bytes of its weights
memory   bytes on one device, moment by moment
parts    the parts of every stage, and what would make them fit
work     operations and hours
costs    disk, and what the judge is asked
tables   lines of at most 80 columns
plan     the command
"""
